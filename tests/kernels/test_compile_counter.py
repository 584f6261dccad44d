"""What Triton prepares is noted, with its phase, by a real compilation for a GPU that is not there."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.compiling import compiling

CHILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from glm5deploy.kernels import compile_counter
from glm5deploy.kernels.sparse_mla import combine_splits_kernel

def prepare(dims):
    types = {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "lse": "*fp32", "splits": "i32"}
    constants = {"BS": 8, "BD": dims, "CHAINED": False}
    signature = types | dict.fromkeys(constants, "constexpr")
    source = ASTSource(combine_splits_kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})

heard = []
triton.knobs.compilation.listener = lambda **facts: heard.append(facts["cache_hit"])
compile_counter.watch()
compile_counter.watch()
with compile_counter.CompileCounter() as counter, compile_counter.tagged("first"):
    prepare(128)
compile_counter.serving_begins(lambda variant: print("LATE", variant.kernel, variant.cached))
prepare(128)
prepare(512)
(variant,) = counter.found
print([counter.names, variant.tag, variant.late, variant.cached, variant.shared, variant.local_bytes])
print(heard)
"""


def test_every_variant_is_written_down_with_its_phase(tmp_path: Path) -> None:
    log = tmp_path / "log"
    printed = compiling("-c", CHILD, GLM5DEPLOY_COMPILE_LOG=str(log), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    name = "glm5deploy.kernels.sparse_mla.combine_splits_kernel"
    assert printed == [
        f"LATE {name} True",
        f"LATE {name} False",
        f"[['{name}'], 'first', False, False, 2048, 0]",
        "[False, True, False]",
    ]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["kernel"] for line in lines} == {name}
    assert len({line["pid"] for line in lines}) == 1
    assert [(line["phase"], line["cached"]) for line in lines] == [
        ("warm-up", False),
        ("serving", True),
        ("serving", False),
    ]
    types = "partial:*fp32:16 partial_lse:*fp32 out:*bf16 lse:*fp32 splits:i32"
    assert lines[2]["variant"] == f"warps=4 stages=3 BS=8 BD=512 CHAINED=False {types}"
