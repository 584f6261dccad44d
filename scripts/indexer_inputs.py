"""Inputs of the lightning indexer on this GPU, and whether its kernels agree with the reference."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from glm5deploy.kernels import indexer, reference
from glm5deploy.kernels.measure import relative_rms
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.tuning import FIRST_FP8_ARCH, gpu

J, K, BLOCK = 32, 2048, 64
cuda = partial(torch.device, "cuda")


def value_type() -> torch.dtype:
    return torch.float8_e4m3fn if gpu(cuda(0)).arch >= FIRST_FP8_ARCH else torch.bfloat16


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, J, 128, device="cuda").to(torch.float8_e4m3fn).to(value_type())


def cache_of(blocks: int) -> torch.Tensor:
    cache = torch.randint(0, 120, (blocks, BLOCK, 132), dtype=torch.uint8, device="cuda")
    reference.index_cache_views(cache)[1].fill_(0.5)
    return cache


def check() -> bool:
    """Logits and selections against the reference, on real sizes."""
    worst = 0.0
    k = torch.randn(5000, 128, device="cuda").to(torch.float8_e4m3fn)
    scales, q, weights = torch.rand(5000, device="cuda"), queries(70), torch.randn(70, J, device="cuda")
    starts = torch.zeros(70, dtype=torch.int32, device="cuda")
    starts[40:] = 1003
    ends = torch.arange(70, dtype=torch.int32, device="cuda") + 4930
    logits = torch.zeros(70, 5000, device="cuda")
    fp8 = value_type() == torch.float8_e4m3fn
    keys = k if fp8 else (k.float() * scales[:, None]).to(value_type())
    indexer.ragged_logits(q, keys, scales if fp8 else None, weights, starts, ends, logits)
    exact = reference.indexer_logits(q, k.float() * scales[:, None], weights)
    for t in range(70):
        part = slice(int(starts[t]), int(ends[t]))
        worst = max(worst, relative_rms(logits[t, : part.stop - part.start], exact[t, part]))
    cache, table = cache_of(100), torch.randperm(100, device="cuda").int().view(2, 50)
    lengths = torch.tensor([3200, 1, 63, 64, 65, 2049], dtype=torch.int32, device="cuda")
    rows = torch.zeros(6, 3200, device="cuda")
    indexer.paged_logits(q[:6], cache, weights[:6], lengths, table, rows)
    for t in range(6):
        position = torch.arange(int(lengths[t]), device="cuda")
        slots = table[t // 3, position // BLOCK].long() * BLOCK + position % BLOCK
        exact = reference.indexer_logits(q[t : t + 1], reference.load_index_keys(cache, slots), weights[t : t + 1])
        worst = max(worst, relative_rms(rows[t, : lengths[t]], exact[0]))
    same = True
    scores = torch.randn(6, 140_000, device="cuda")
    scores[1] = scores[1].round()
    sizes = torch.tensor([140_000, 140_000, 0, 2047, 2049, 70_000], dtype=torch.int32, device="cuda")
    for k_best in (K, 64, 4096):
        workspace = torch.empty(topk_workspace_elements(6, 140_000, k_best), dtype=torch.int32, device="cuda")
        out = torch.full((6, k_best), 7, dtype=torch.int32, device="cuda")
        select_topk(scores, sizes, k_best, 140_000, out, workspace)
        same &= torch.equal(out, reference.select_topk(scores, sizes, k_best))
    print(f"logits: worst relative RMS error {worst:.1e} (limit 2e-3); top-k equal to the reference: {same}")
    return worst <= 2e-3 and same
