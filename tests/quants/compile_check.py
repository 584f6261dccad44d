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

from glm5deploy.quants import across, across_kernel, launch, linear_kernel, moe_kernel
from glm5deploy.quants.arguments import kernel_format
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.planes import empty_planes

# A case: kernel, its formats, and the launch that products.py would choose on a GPU of 132 multiprocessors
PROCESSORS = 132
SHARED = {10 * major + minor: size for (major, minor), size in launch.SHARED.items()}
ELEMENTS = {1: "*i16", 2: "*i16", 4: "*i16", 8: "*i16", 16: "*bf16"}
POINTERS = {"x", "y", "hidden", "out", "terms", "parts", "tickets", "ids", "order", "work", "weights"}


def planes_signature(names: tuple[str, ...], type_name: str) -> dict[str, str]:
    """Pointer types of low, high, words, halves; a missing plane is stood in for by the low one."""
    f = FORMATS[type_name]
    low = ELEMENTS[f.low]
    return dict(
        zip(
            names,
            (
                low,
                ELEMENTS[f.high] if f.high else low,
                "*i32" if f.word_count else low,
                "*i16" if f.half_count else low,
            ),
            strict=True,
        )
    )


def _across(
    kind: str, names: list[str], capability: int, early: bool
) -> tuple[Any, launch.Launch, dict[str, str], dict[str, Any]]:
    """Kernel, launch, types of planes and constants of GLM-5's products of one token."""
    formats = [kernel_format(FORMATS[name]) for name in names]
    columns = 256 if kind == "down" else 6144
    weights = tuple(empty_planes(name, 1, columns) for name in names)
    across.shared_memory = lambda device: SHARED.get(capability, launch.LEAST_SHARED)
    constants: dict[str, Any] = {"EARLY": early, "FMT": formats[0]}
    if kind == "across":
        kernel, c = across_kernel.linear_across_kernel, across.linear_launch(weights)
        planes = planes_signature(("al", "ah", "aw", "a_s"), names[0])
        planes |= planes_signature(("bl", "bh", "bw", "bs"), names[-1])
        constants |= {"A": formats[0], "B": formats[1] if len(names) > 1 else ()}
    elif kind == "gate_up":
        kernel, c = across_kernel.gate_up_across_kernel, across.gate_up_launch(*weights)
        planes = planes_signature(("gl", "gh", "gw", "gs"), names[0])
        planes |= planes_signature(("ul", "uh", "uw", "us"), names[1])
    else:
        kernel, c = across_kernel.down_across_kernel, across.down_launch(weights[0], 8)
        planes = planes_signature(("low", "high", "words", "halves"), names[0])
        constants |= {"TOPK": 8}
    assert c is not None, "no such launch"
    return kernel, c, planes, constants | {"E": c.warps, "STAGES": c.stages}


def compile_case(case: str, capability: int) -> dict[str, Any]:
    """Case names: linear:TYPE:TOKENS, gate_up:TYPE,TYPE:TOKENS, down:TYPE:TOKENS, dense:TYPE:0.

    For one token with K over a program's warps: across:TYPE:1 or across:TYPE,TYPE:1 (one weight or two), and
    gate_up:TYPE,TYPE:across, down:TYPE:across. Launches are early where the GPU has that.
    """
    kind, types, count = case.split(":")
    names, tokens = types.split(","), 1 if count == "across" else int(count)
    early = capability >= 90
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
    sizes = dict.fromkeys(
        ("M", "N", "K", "P", "n0", "n1", "NA", "NB", "x_stride", "y_stride", "SUPERS", "PARTS", "TILES"), "i32"
    )
    four = ("low", "high", "words", "halves")
    constants: dict[str, Any] = {"EVEN": True, "PTX": True, "EARLY": early}
    if kind == "across" or count == "across":
        kernel, c, planes, chosen = _across(kind, names, capability, early)
        constants |= chosen
    elif kind == "linear":
        c = launch.linear_launch(tokens, 2048, 24, PROCESSORS, together)
        kernel, planes = linear_kernel.linear_kernel, planes_signature(four, names[0])
        constants |= {"FMT": kernel_format(FORMATS[names[0]]), "BM": c.bm, "STAGES": c.stages}
    elif kind == "dense":
        c = launch.Launch(64, 16)
        kernel, planes = linear_kernel.dense_kernel, planes_signature(four, names[0])
        constants |= {"FMT": kernel_format(FORMATS[names[0]])}
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
    constants["BN"] = c.bn
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    known = common | sizes | planes
    arguments = [a for a in kernel.arg_names if a not in constants]
    aligned = {
        (k,): [["tt.divisibility", 16]]
        for k, a in enumerate(kernel.arg_names)
        if a in planes or a in POINTERS or a in ("N", "K", "NA", "NB", "x_stride", "y_stride")
    }
    source = ASTSource(kernel, {a: known[a] for a in arguments}, constexprs=constants, attrs=aligned)
    options: dict[str, Any] = {"num_warps": c.warps, "num_stages": c.stages}
    if constants.get("EARLY"):
        options["launch_pdl"] = True
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resource_usage(made.asm["cubin"])
    return {"case": case, "capability": capability, "shared": made.metadata.shared, **usage}


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
