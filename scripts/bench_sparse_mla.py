"""Sparse MLA on this GPU: checks the kernels, then times them; FlashMLA and vLLM's XPU kernel too where they import.

    python scripts/bench_sparse_mla.py [--quick] [--json FILE]

Each time is of a launch that was compared with fp32 first, and is the median of CUDA-graph replays over rotating
inputs, queued up so that the GPU never waits for the host: `one` for a graph of one call, `many` for one of sixteen.
Goals are ratios to FlashMLA's `one`; all of them stand in a table at the end. Figures are written after every shape,
for a run may be cut off. Exit status 1 when a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from aligned_table import aligned
from sparse_mla_errors import FEW, KERNEL_LIMIT, SCALE, TOKENS, Attend, K, check

from glm5deploy.kernels import reference
from glm5deploy.kernels.attention import sparse_mla_fwd, split_workspace_elements
from glm5deploy.kernels.layout import PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.measure import graph_time, relative_rms
from glm5deploy.kernels.prepare import Launch, prepare

COPY_BYTES_PER_US = 4.3e6
INPUT_SETS = 4
CACHE_ROWS = 262_144  # 302 MB of bf16 rows: several times the L2 cache
# T, H, goal as a ratio to FlashMLA, and what an earlier run on an H200 gave for FlashMLA and the XPU kernel (replay of
# one call, microseconds).
SHAPES = (
    (1, 8, 0.18, 66.5, 201),
    (8, 8, 0.26, 74.0, 236),
    (64, 8, 0.65, 79.7, 243),
    (256, 8, 0.95, 180, 326),
    (2048, 8, 1.10, 1124, 2398),
    (1, 64, 0.18, 65.3, 206),
    (16, 64, 0.50, 69.2, 232),
    (128, 64, 1.4, 87.6, 583),
    (2048, 64, 1.5, 1085, 9382),
)


def flash_mla(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd

    return flash_mla_sparse_fwd(q, rows[:, None], slots[:, None], SCALE)[0]


def xpu(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    return triton_bf16_mla_sparse_interface(q, rows[:, None], slots[:, None], SCALE)[0]


def peers() -> dict[str, Attend]:
    """Those that import and run here, FlashMLA with the heads padded to 64 as vLLM pads them."""
    found: dict[str, Attend] = {}
    q, rows = torch.randn(1, 64, 576, device="cuda").bfloat16(), torch.randn(K, 576, device="cuda").bfloat16()
    slots = torch.arange(K, dtype=torch.int32, device="cuda")[None]
    for name, attend in (("FlashMLA", flash_mla), ("XPU", xpu)):
        try:
            attend(q, rows, slots)
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            print(f"{name} is not here: {str(error).splitlines()[0][:100]}")
        else:
            found[name] = attend
    return found


def ours(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return sparse_mla_fwd(q, rows, slots, None, SCALE)[0]


def compile_ours() -> None:
    """All launches of this script side by side: one after the other they take longer than all that is measured."""
    device = torch.device("cuda")

    def run(tokens: int, heads: int, packed: bool) -> None:
        q = torch.zeros(tokens, heads, QK_DIM, dtype=torch.bfloat16, device=device)
        rows = torch.zeros(1, PACKED_ROW_BYTES if packed else QK_DIM, device=device)
        slots = torch.zeros(tokens, K, dtype=torch.int32, device=device)
        cache = rows.to(torch.uint8 if packed else torch.bfloat16)
        for counts in (None, slots[:, 0].contiguous()):
            sparse_mla_fwd(q, cache, slots, counts, SCALE)

    shapes = [*((tokens, heads) for tokens, heads, *_ in SHAPES), (TOKENS, 8), (FEW, 8)]
    calls = [(*shape, packed) for shape in shapes for packed in (False, True)]
    began = time.monotonic()
    prepare([Launch(("attention", *call), partial(run, *call)) for call in calls], device)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)


def errors_of(q: torch.Tensor, rows: torch.Tensor, packed: torch.Tensor, slots: torch.Tensor) -> list[float]:
    """Errors of the launches that are about to be timed, plain and packed cache: of a few tokens of all."""
    some = sorted({0, len(q) // 2, max(0, len(q) - 2), len(q) - 1})
    found = []
    for cache in (rows, packed):
        named = cache[slots[some].flatten().long()]
        plain = reference.unpack_fp8_ds_mla(named) if cache.dtype == torch.uint8 else named
        order = torch.arange(len(named), device=q.device).view(len(some), K)
        found.append(relative_rms(ours(q, cache, slots)[some], reference.sparse_mla(q[some], plain, order, SCALE)[0]))
    return found


def time_shape(tokens: int, heads: int, found: dict[str, Attend], quick: bool) -> dict[str, Any]:
    q = [torch.randn(tokens, heads, 576, device="cuda").bfloat16() for _ in range(INPUT_SETS)]
    pick = partial(torch.randint, 0, CACHE_ROWS, (tokens, K), dtype=torch.int32, device="cuda")
    slots = [pick().sort(dim=1).values for _ in range(INPUT_SETS)]
    counts = torch.full((tokens,), K, dtype=torch.int32, device="cuda")
    rows = torch.randn(CACHE_ROWS, 576, device="cuda").bfloat16()
    packed = reference.pack_fp8_ds_mla(rows)
    out = torch.empty(tokens, heads, 512, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(tokens, heads, device="cuda")
    workspace = torch.empty(split_workspace_elements(heads, K, rows.device), device="cuda")

    def both(make: Callable[[int], Callable[[], object]]) -> tuple[float, float]:
        calls = [make(i) for i in range(INPUT_SETS)]
        large = tokens * heads >= 4096
        repeats = 5 if quick or large else 30
        return graph_time(calls, repeats, 1), graph_time(calls, repeats, 4 if large else 16)

    result: dict[str, Any] = {"T": tokens, "H": heads, "floor": tokens * K * 1152 / COPY_BYTES_PER_US}
    result["errors"] = errors_of(q[0], rows, packed, slots[0])
    if not all(error <= KERNEL_LIMIT for error in result["errors"]):
        return result
    result["ours"] = both(lambda i: lambda: sparse_mla_fwd(q[i], rows, slots[i], counts, SCALE, out, lse, workspace))
    result["fp8"] = both(lambda i: lambda: sparse_mla_fwd(q[i], packed, slots[i], counts, SCALE, out, lse, workspace))
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 64 - heads)) for x in q]
    for name, attend in found.items():
        inputs = wide if name == "FlashMLA" else q
        result[name] = both(lambda i, a=attend, x=inputs: lambda: a(x[i], rows, slots[i]))  # type: ignore[misc]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    found = peers()
    compile_ours()
    good, errors = check(ours, found)
    if not good:
        print("\n".join([*errors, "not timed"]))
        return 1
    results: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, K {K}, microseconds one/many")
    for tokens, heads, goal, *before in SHAPES:
        earlier = {name: (time, None) for name, time in zip(("FlashMLA", "XPU"), before, strict=True)}
        results.append({"goal": goal} | earlier | time_shape(tokens, heads, found, arguments.quick))
        print(line(results[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    print("\n".join([*table(results), *errors]))
    return 0 if all("ours" in r for r in results) else 1


def pair(times: tuple[float, float | None]) -> str:
    """Microseconds one/many; of a peer that is not here, an earlier run's."""
    return f"{times[0]:.1f} earlier" if times[1] is None else f"{times[0]:.1f}/{times[1]:.1f}"


def line(r: dict[str, Any]) -> str:
    """One shape's figures."""
    shape = f"{r['T']:5} x {r['H']:3}  errors {' and '.join(f'{error:.2e}' for error in r['errors'])}"
    if "ours" not in r:
        return f"{shape}: WRONG, not timed"
    times = "  ".join(f"{name} {pair(r[name])}" for name in ("ours", "fp8", "FlashMLA", "XPU"))
    return f"{shape}  floor {r['floor']:.1f}  {times}"


def table(results: list[dict[str, Any]]) -> list[str]:
    """Every shape beside its goal: by `one`, as the goals are, and by `many`, as a layer costs while serving."""
    rows = [("T x H", "ours", "FlashMLA", "XPU", "packed", "one", "many", "goal", "by one", "by many", "XPU slower")]
    for r in results:
        shape = f"{r['T']} x {r['H']}"
        if "ours" not in r:
            rows.append((shape, "WRONG", *[""] * 9))
            continue
        ratios = [a / b if b else None for a, b in zip(r["ours"], r["FlashMLA"], strict=True)]
        slower = all(theirs is None or mine <= theirs for mine, theirs in zip(r["ours"], r["XPU"], strict=True))
        rows.append(
            (
                shape,
                *(pair(r[name]) for name in ("ours", "FlashMLA", "XPU", "fp8")),
                *("" if ratio is None else f"{ratio:.3f}" for ratio in ratios),
                f"{r['goal']:.2f}",
                *("" if ratio is None else "met" if ratio <= r["goal"] else "MISSED" for ratio in ratios),
                "met" if slower else "MISSED",
            )
        )
    return aligned(rows)


if __name__ == "__main__":
    sys.exit(main())
