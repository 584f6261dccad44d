"""Compiles the router for GPUs that are not there: ``python -m tests.quants.compile_router CAPABILITY...``.

Prints what each launch needs, one JSON object a line, on GPUs other than Hopper of the largest alone; in a process
without the interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from glm5deploy.quants.router import LAUNCHES, RouterLaunch, router_kernel
from tests.quants.compile_check import resource_usage

TYPES = {"x": "*bf16", "weight": "*fp32", "bias": "*fp32", "ids": "*i32", "weights": "*fp32", "logits": "*fp32"}
TYPES |= {"ticket": "*i32", "T": "i32", "x_stride": "i32", "scale": "fp32"}


def compile_router(c: RouterLaunch, capability: int) -> dict[str, Any]:
    """GLM-5's: 256 experts, 6144 inputs, 8 experts a token."""
    constants = {"E": 256, "K": 6144, "TOPK": 8, "PARTS": c.parts, "BT": c.tokens, "BE": c.experts}
    constants |= {"BK": 128 * c.warps, "BX": 256}
    names = router_kernel.arg_names
    aligned = [a for a in TYPES if TYPES[a].startswith("*") or a == "x_stride"]
    source = ASTSource(
        router_kernel,
        {a: TYPES[a] for a in names if a in TYPES},
        constexprs=constants,
        attrs={(names.index(a),): [["tt.divisibility", 16]] for a in aligned},
    )
    options = {"num_warps": c.warps, "num_stages": 3}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    facts = {"capability": capability, "tokens": c.tokens, "warps": c.warps, "shared": made.metadata.shared}
    return {**facts, "barriers": made.asm["ptx"].count("bar.sync"), **resource_usage(made.asm["cubin"])}


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        for config in LAUNCHES if capability == 90 else LAUNCHES[-1:]:
            print(json.dumps(compile_router(config, capability)), flush=True)
