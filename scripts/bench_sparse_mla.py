"""Sparse MLA on this GPU: checks the kernels, then times them; FlashMLA and vLLM's XPU kernel too where they import.

    python scripts/bench_sparse_mla.py [--quick] [--json FILE]

Each time is of a launch that was compared with fp32 first, and is the median of CUDA-graph replays over rotating
inputs, queued up so that the GPU never waits for the host: `one` for a graph of one call, `many` for one of sixteen.
Goals are ratios to FlashMLA's `one`. Figures are written after every shape, for a run may be cut off. Exit status 1
when a kernel is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from glm5deploy.kernels import reference
from glm5deploy.kernels.attention import sparse_mla_fwd, split_workspace_elements
from glm5deploy.kernels.measure import graph_time, relative_rms

K = 2048
SCALE = (192 + 64) ** -0.5
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
CONTEXTS = (2047, 2048, 2049, 4096, 8192, 32768, 131072)
KERNEL_LIMIT = 5e-3
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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


def check(found: dict[str, Attend]) -> bool:
    """Errors against fp32 over contexts around and beyond K; rows past the context are NaN.

    For the packed cache: the kernel's error against what the cache holds, and the error with the cache's own rounding.
    """
    good = True
    print("context  ours bf16  ours fp8  with its rounding " + "".join(f"{name:>11}" for name in found))
    for context in CONTEXTS:
        heads, tokens = 8, 4
        rows = torch.randn(context + 64, 576, device="cuda").bfloat16()
        rows[context:] = torch.nan
        q = torch.randn(tokens, heads, 576, device="cuda").bfloat16()
        slots = torch.full((tokens, K), -1, dtype=torch.int32, device="cuda")
        for t in range(tokens):
            chosen = torch.randperm(context, device="cuda")[:K]
            slots[t, : len(chosen)] = chosen.int()
        exact, _ = reference.sparse_mla(q, rows, slots, SCALE)
        packed = reference.pack_fp8_ds_mla(rows)
        held, _ = reference.sparse_mla(q, reference.unpack_fp8_ds_mla(packed), slots, SCALE)
        plain_error = relative_rms(ours(q, rows, slots), exact)
        packed_out = ours(q, packed, slots)
        packed_error = relative_rms(packed_out, held)
        padded = torch.nn.functional.pad(q, (0, 0, 0, 64 - heads))
        clean = rows.nan_to_num(0.0)
        theirs = [relative_rms(attend(padded, clean, slots)[:, :heads], exact) for attend in found.values()]
        good &= plain_error <= KERNEL_LIMIT and packed_error <= KERNEL_LIMIT  # NaN is above any limit
        line = f"{context:7}  {plain_error:.2e}  {packed_error:.2e}  {relative_rms(packed_out, exact):.2e}          "
        print(line + "".join(f"{e:11.2e}" for e in theirs), flush=True)
    return good


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
    if not check(found):
        print("errors above the limits: not timed")
        return 1
    results: list[dict[str, Any]] = []
    print(f"{torch.cuda.get_device_name()}, K {K}, microseconds one/many; goal and ratio to FlashMLA")
    for tokens, heads, goal, flash_before, xpu_before in SHAPES:
        results.append(time_shape(tokens, heads, found, arguments.quick))
        print(line(results[-1], goal, flash_before, xpu_before), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1))
    return 0 if all("ours" in r for r in results) else 1


def line(r: dict[str, Any], goal: float, flash_before: float, xpu_before: float) -> str:
    """One shape's figures; where a peer is not here, those of an earlier run."""
    errors = " and ".join(f"{error:.2e}" for error in r["errors"])
    shape = f"{r['T']:5} x {r['H']:3}  errors {errors}"
    if "ours" not in r:
        return f"{shape}: WRONG, not timed"
    flash, slowest = r.get("FlashMLA", (flash_before, None)), r.get("XPU", (xpu_before, None))
    ratio = r["ours"][0] / flash[0]
    words = [shape, f"floor {r['floor']:7.1f}"]
    for name, times in (("ours", r["ours"]), ("fp8", r["fp8"]), ("FlashMLA", flash), ("XPU", slowest)):
        many = " (earlier)" if times[1] is None else f"/{times[1]:.1f}"
        words.append(f"{name} {times[0]:7.1f}{many}")
    words.append(f"ratio {ratio:.2f}" + (f" many {r['ours'][1] / flash[1]:.2f}" if flash[1] else ""))
    words.append(f"goal {goal:.2f} {'met' if ratio <= goal else 'MISSED'}")
    return "  ".join(words) + ("" if r["ours"][0] <= slowest[0] else "  MISSED: slower than the XPU kernel")


if __name__ == "__main__":
    sys.exit(main())
