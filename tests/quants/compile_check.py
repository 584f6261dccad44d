"""Compiles kernels for a GPU that is not there and prints what they need, one JSON object a line.

Run as ``python -m tests.quants.compile_check CAPABILITY [CASE...]`` in a process without the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm5deploy.quants import activations, launch, linear_kernel, moe_kernel, one_token_kernel
from glm5deploy.quants.arguments import kernel_format
from glm5deploy.quants.formats import FORMATS
from tests.quants.gluon_source import TYPES, integer_source, planes_signature
from tests.support.chain_order import WAIT, out_of_order
from tests.support.compiling import kernel_source

# A case: kernel, its formats, and the launch that products.py would choose on a GPU of 132 multiprocessors
PROCESSORS = 132
LINEAR = {"linear": (2624, 24), "short": (512, 24), "long": (19360, 24), "one": (6144, 8)}  # rows, super-blocks
PAIRS = {"pair": (2624, 24), "queries": (6144, 8)}  # rows of two weights
HIDDEN = {"down": 256, "deep": 1024, "deepest": 4096}  # units, of products with integers
POINTERS = {"x", "y", "hidden", "out", "terms", "parts", "tickets", "ids", "order", "work", "weights"}
POINTERS |= {"scores", "logits", "bias"}
WEIGHTS = ("bias",)  # of what is read ahead of the wait: a router's; planes are asked for, not read
# Kernels around the products, and what they are compiled for.
SORT, FIT = {"BM": 8, "CHUNK": 1024}, {"ROWS": 1, "SUPERS": 32}
AROUND = {
    "sort": (moe_kernel.sort_kernel, SORT),
    "sum": (moe_kernel.sum_kernel, {"TOPK": 8, "BN": 512, "ALSO": True}),
    "fit": (activations.fit_kernel, FIT),
    "sort_fit": (activations.sort_fit_kernel, SORT | FIT),
}


def integer_case(kind: str, names: list[str], tokens: int, capability: int) -> tuple[Any, launch.Launch]:
    """The source and the launch of a product with integers: one of LINEAR, gate_up, or one of HIDDEN."""
    from glm5deploy.quants import integer_linear, integer_moe

    formats, others = {"FMT": names[0]}, {}
    if kind in LINEAR:
        kernel = integer_linear.integer_linear_kernel
        c = launch.integer_linear_launch(tokens, *LINEAR[kind], PROCESSORS)
    else:
        units = HIDDEN.get(kind, 256)
        products = (units, 24, True), (6144, units // 256, True)
        both = launch.integer_moe_launch(8 * tokens, 256, *products, PROCESSORS)
        c = both and both[kind in HIDDEN]
        if kind in HIDDEN:
            kernel, others = integer_moe.integer_down_kernel, {"SUPERS": units // 256}
        else:
            kernel, others = integer_moe.integer_gate_up_kernel, {"TOPK": 8}
            formats = dict(zip("GU", names, strict=True))
    assert c, f"{kind} of {tokens} tokens is no product with integers"
    constants = {"BN": c.bn, "BM": c.bm, "WARPS": c.warps, "STAGES": c.stages, "CHAINED": capability >= 90} | others
    return integer_source(kernel, formats, constants), c


def around_source(kind: str, capability: int) -> Any:
    """The source of one of AROUND."""
    kernel, constants = AROUND[kind]
    types = TYPES | {"x": "*bf16", "terms": "*fp32", "also": "*bf16", "out": "*bf16"}
    pointers = [name for name in kernel.arg_names if name in types]
    return kernel_source(kernel, types, constants | {"CHAINED": capability >= 90}, pointers)


def compile_case(case: str, capability: int) -> dict[str, Any]:
    """Case names: one of LINEAR and down:TYPE:TOKENS, one of PAIRS and gate_up:TYPE,TYPE:TOKENS, dense:TYPE:0.

    With integer_ before them, of products with integers. One of AROUND has neither types nor tokens.
    """
    if case in AROUND:
        return needs(case, capability, around_source(case, capability), {"num_warps": 4})
    kind, types, count = case.split(":")
    names, tokens = types.split(","), int(count)
    if kind.startswith("integer_"):
        source, c = integer_case(kind.removeprefix("integer_"), names, tokens, capability)
        return needs(case, capability, source, c.options)
    together = capability // 10 in launch.TOGETHER
    common = {
        "x": "*bf16",
        "y": "*bf16",
        "hidden": "*bf16",
        "out": "*bf16",
        "terms": "*fp32",
        "parts": "*fp32",
        "tickets": "*i32",
    }
    common |= {"ids": "*i32", "order": "*i32", "work": "*i32", "weights": "*fp32"}
    letters = ("M", "N", "K", "P", "n0", "n1", "NA", "NB", "ROWS", "UP", "FIRST", "SUPERS", "PARTS", "TILES")
    sizes = dict.fromkeys((*letters, "x_stride", "y_stride"), "i32")
    four, other = ("low", "high", "words", "halves"), ("al", "ah", "aw", "a_s")
    constants: dict[str, Any] = {"EVEN": True, "PTX": True}
    if kind in LINEAR:
        c = launch.linear_launch(tokens, *LINEAR[kind], PROCESSORS, together)
        kernel, planes = linear_kernel.linear_kernel, planes_signature(four, names[0])
        constants |= {"FMT": kernel_format(FORMATS[names[0]]), "BM": c.bm, "STAGES": c.stages}
    elif kind in PAIRS:
        c = launch.pair_launch(tokens, *PAIRS[kind], PROCESSORS) or launch.SOME
        kernel, planes = linear_kernel.pair_kernel, planes_signature(("al", "ah", "aw", "a_s"), names[0])
        planes |= planes_signature(("bl", "bh", "bw", "bs"), names[1])
        constants |= {"A": kernel_format(FORMATS[names[0]]), "B": kernel_format(FORMATS[names[1]])}
        constants |= {"BM": c.bm, "STAGES": c.stages}
    elif kind == "dense":
        c = launch.Launch(64, 16)
        kernel, planes = linear_kernel.dense_kernel, planes_signature(four, names[0])
        constants |= {"FMT": kernel_format(FORMATS[names[0]])}
    elif kind.startswith("one_"):
        both = launch.one_token_launch(8, 256, 24, 6144, PROCESSORS)
        common |= {"scores": "*fp32", "logits": "*fp32", "bias": "*fp32", "scale": "fp32"}
        if kind == "one_gate_up":
            c, kernel, planes = both[0], one_token_kernel.one_gate_up_kernel, {}
            fours = ("gl", "gh", "gw", "gs"), ("ul", "uh", "uw", "us"), other, ("bl", "bh", "bw", "bs")
            for pointers, name in zip(fours, names, strict=True):
                planes |= planes_signature(pointers, name)
            constants |= {letter: kernel_format(FORMATS[name]) for letter, name in zip("GUAB", names, strict=True)}
            constants |= {"E": 256, "EX": 256, "WARPS": c.warps}
        else:
            c, kernel = both[1], one_token_kernel.one_down_kernel
            planes = planes_signature(four, names[0]) | planes_signature(other, names[1])
            constants |= {"FMT": kernel_format(FORMATS[names[0]]), "A": kernel_format(FORMATS[names[1]])}
            constants |= {"TOPK": 8, "SCORES": 8, "ONE": True}
        constants |= {"BM": c.bm, "STAGES": c.stages}
    else:
        pairs = 8 * tokens
        search = 1 if tokens == 1 else launch.SEARCH_PAIRS if pairs <= launch.SEARCH_PAIRS else 0
        constants |= {"PAIRS": search}
        if kind == "gate_up":
            c = launch.gate_up_launch(pairs, 256, 256, 24, PROCESSORS)
            planes = planes_signature(("gl", "gh", "gw", "gs"), names[0])
            planes |= planes_signature(("ul", "uh", "uw", "us"), names[1])
            constants |= {"G": kernel_format(FORMATS[names[0]]), "U": kernel_format(FORMATS[names[1]])}
            constants |= {"TOPK": 8, "STAGES": c.stages}
            kernel = moe_kernel.gate_up_kernel
        else:
            c = launch.down_launch(pairs, 256, 6144, PROCESSORS)
            planes = planes_signature(four, names[0])
            constants |= {"FMT": kernel_format(FORMATS[names[0]]), "STAGES": c.stages, "ONE": True}
            kernel = moe_kernel.down_kernel
        constants |= {"BM": c.bm}
    constants |= {"BN": c.bn, "LATE": c.late, "CHAINED": capability >= 90}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    known = common | sizes | planes
    arguments = [a for a in kernel.arg_names if a not in constants]
    aligned = {
        (k,): [["tt.divisibility", 16]]
        for k, a in enumerate(kernel.arg_names)
        if a in planes or a in POINTERS or a in ("N", "K", "NA", "NB", "ROWS", "UP", "x_stride", "y_stride")
    }
    source = ASTSource(kernel, {a: known[a] for a in arguments}, constexprs=constants, attrs=aligned)
    return needs(case, capability, source, c.options | {"num_stages": c.stages})


def needs(case: str, capability: int, source: Any, options: dict[str, Any]) -> dict[str, Any]:
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    early = out_of_order(ptx, source.signature, WEIGHTS) if WAIT in ptx else []
    usage = resource_usage(made.asm["cubin"])
    return {
        "case": case,
        "capability": capability,
        "shared": made.metadata.shared,
        "waits": WAIT in ptx,
        "early": early,
        **usage,
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and local memory (stack and spills) a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.run([tool, "-res-usage", f.name], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "stack": found["STACK"], "local": found["LOCAL"]}


if __name__ == "__main__":
    for name in sys.argv[2:]:
        print(json.dumps(compile_case(name, int(sys.argv[1]))), flush=True)
