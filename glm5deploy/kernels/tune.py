"""Measures the sparse attention kernel's launch parameters on the GPU at hand and writes them as a table.

    python -m glm5deploy.kernels.tune --heads 8 --out TABLE.json [--topk 2048]

A process that finds TABLE.json named in GLM5DEPLOY_KERNEL_TABLE then uses it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from glm5deploy.kernels.attention import sparse_mla_fwd
from glm5deploy.kernels.layout import PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.measure import graph_time, relative_rms
from glm5deploy.kernels.reference import sparse_mla, unpack_fp8_ds_mla
from glm5deploy.kernels.tuning import Gpu, SparseConfig, SparseRow, gpu, save_table

# Measured at the first number of tokens, used up to the second.
TOKENS = ((1, 2), (8, 16), (64, 128), (256, 512), (2048, 1 << 30))
CACHE_ROWS = 131_072  # 151 MB of plain rows: more than any L2 cache
INPUT_SETS = 4
MAX_ERROR = 5e-3


def candidates(heads: int) -> Iterator[SparseConfig]:
    """Every configuration worth trying; those that do not fit the GPU drop out when they fail to launch."""
    for block_heads in (16,) if heads <= 16 else (16, 32, 64):
        for block_keys, warps, stages in ((64, 4, 2), (64, 8, 2), (32, 4, 2), (32, 4, 3), (32, 8, 3), (32, 2, 2)):
            for per_sm in (1, 2, 4):
                yield SparseConfig(block_heads, block_keys, warps, stages, per_sm)


def measure(heads: int, topk: int, packed: bool, tokens: int, device: torch.device) -> SparseConfig:
    """The fastest of the candidates whose result is right."""
    width = PACKED_ROW_BYTES if packed else QK_DIM
    if packed:
        rows = torch.randint(0, 120, (CACHE_ROWS, width), dtype=torch.uint8, device=device)
        rows[:, 512:528] = torch.full((CACHE_ROWS, 4), 0.01, device=device).view(torch.uint8)
    else:
        rows = torch.randn(CACHE_ROWS, width, device=device).bfloat16()
    q = [torch.randn(tokens, heads, QK_DIM, device=device).bfloat16() for _ in range(INPUT_SETS)]
    slots = [torch.randint(0, CACHE_ROWS, (tokens, topk), dtype=torch.int32, device=device) for _ in range(INPUT_SETS)]
    few = min(tokens, 4)
    plain = unpack_fp8_ds_mla(rows) if packed else rows
    expected, _ = sparse_mla(q[0][:few], plain, slots[0][:few], 0.06)
    del plain
    best: tuple[float, SparseConfig] | None = None
    for config in candidates(heads):
        calls = [partial(sparse_mla_fwd, x, rows, s, None, 0.06, config=config) for x, s in zip(q, slots, strict=True)]
        try:
            out, _ = calls[0]()
        except OutOfResources:
            continue
        if not relative_rms(out[:few], expected) <= MAX_ERROR:
            raise RuntimeError(f"{config} gives wrong results on this GPU: do not serve on it, and report this")
        time = graph_time(calls, repeats=5, per_graph=4)
        if best is None or time < best[0]:
            best = time, config
    if best is None:
        raise RuntimeError("no configuration fits this GPU")
    return best[1]


def tune(heads: int, topk: int, device: torch.device) -> tuple[Gpu, list[SparseRow]]:
    """Rows for both cache types and every number of tokens, for up to `heads` heads."""
    of = gpu(device)
    rows = [
        SparseRow((of.family,), packed, max(16, heads), most, measure(heads, topk, packed, tokens, device))
        for packed in (False, True)
        for tokens, most in TOKENS
    ]
    return of, rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5deploy.kernels.tune", description=__doc__)
    parser.add_argument("--heads", type=int, required=True, help="attention heads of one GPU")
    parser.add_argument("--topk", type=int, default=2048, help="selected positions")
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    arguments = parser.parse_args()
    of, rows = tune(arguments.heads, arguments.topk, torch.device("cuda", torch.cuda.current_device()))
    save_table(arguments.out, of, rows)
    for row in rows:
        sys.stdout.write(f"{'packed' if row.packed else 'plain'} up to {row.max_tokens} tokens: {row.config}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
