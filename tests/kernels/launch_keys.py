"""Does warm-up launch every variant that steps launch? ``python -m tests.kernels.launch_keys ARCH``.

Prints what :func:`tests.support.launch_keys.compare` found, as JSON, had the selection been left out. A process of its
own: the tests' process interprets.
"""

from __future__ import annotations

import json
import random
import sys
from functools import partial

import torch

from glm5deploy.kernels import indexer, tuning
from glm5deploy.kernels.add_norm import add_norm
from glm5deploy.kernels.attention import sparse_mla_fwd, sparse_mla_values, split_workspace_elements
from glm5deploy.kernels.index_input import index_input
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.latent_input import latent_input
from glm5deploy.kernels.query_input import query_input
from glm5deploy.kernels.row_product import BESIDE_TOKENS, MOST_TOKENS, ROUTER_TOKENS, row_product
from glm5deploy.kernels.slots import Lookup, slots_from_positions
from glm5deploy.kernels.step_tokens import step_tokens
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.warmup import Serving, launches
from tests.support import launch_keys

CPU = torch.device("cpu")
BLOCK = 64
LONG = 40_000
STEPS = 40
# What `Serving` needs for all launches that stand in for vLLM's, with the sizes of GLM-5.
FUSED = {"query_rank": 2048, "query_nope": 192, "values": 256, "index_at_once": True, "width": 6144, "experts": 256}


def step(serving: Serving, tokens: int, width: int, next_n: int) -> None:
    """All launches of a step over views as the engine makes them, on torch's default device.

    ``width`` positions are scored. Every index is 0, so that the launches are harmless where they run.
    """
    device = torch.get_default_device()
    heads, kind = serving.heads, serving.dtype
    rows_wide = 656 if serving.packed else 576
    cache = torch.zeros(4, BLOCK, rows_wide, dtype=torch.uint8 if serving.packed else kind)
    keys = torch.zeros(8, BLOCK, 132, dtype=torch.uint8)[::2]
    fused = torch.zeros(tokens, 2624, dtype=kind)
    slots64 = torch.zeros(tokens + 1, dtype=torch.int64)[random.randint(0, 1) :][:tokens]
    store_latent(fused[:, 2048:2560], fused[:, 2560:], slots64, cache)
    if serving.query_rank:
        before_attention(serving, slots64, cache)
    projected = torch.zeros(tokens, 128 + serving.index_heads, dtype=kind)
    angles, norm = torch.zeros(9, 64, dtype=kind), torch.zeros(128)
    key = torch.zeros(tokens, 128, dtype=kind)
    indexer.prepare_index_key(projected[:, :128], norm, norm, 1e-6, slots64, angles, key)
    indexer.store_index_keys(keys, key, slots64)
    value_type = tuning.index_value_dtype(tuning.gpu(device))
    values = torch.empty(serving.max_tokens, serving.index_heads, 128, dtype=value_type)
    folded = torch.zeros(serving.max_tokens, serving.index_heads)
    query = torch.zeros(tokens, serving.index_heads, 128, dtype=kind)
    prepared = values[:tokens], folded[:tokens]
    indexer.prepare_index_query(query, projected[:, 128:], slots64, angles, 0.1, *prepared)
    if serving.index_at_once:
        inputs = query, projected[:, :128], projected[:, 128:], (norm, norm, 1e-6), slots64, angles, 0.1
        index_input(*inputs, slots64, keys, *prepared)
    lengths = torch.zeros(tokens + 3, dtype=torch.int32)[random.randint(0, 3) :][:tokens]
    table = torch.zeros(max(1, tokens // next_n), LONG // BLOCK + random.randint(9, 99), dtype=torch.int32)
    selected = torch.zeros(serving.max_tokens, serving.topk, dtype=torch.int32)
    score(serving, values, folded, keys, lengths, table, selected, width, next_n)
    slots, counts = torch.empty_like(selected)[:tokens], torch.empty(tokens, dtype=torch.int32)
    requests = torch.zeros(tokens, dtype=torch.int32)
    bounds = torch.zeros(random.randint(2, 40), dtype=torch.int32)
    step_tokens(bounds, bounds[random.randint(0, 1) :][: len(bounds) - 1], requests, requests.clone())
    slots_from_positions(selected[:tokens], requests, table, BLOCK, slots, counts, random.choice((64, 128)))
    latent = torch.zeros(heads, tokens, 512, dtype=kind).transpose(0, 1)
    rope = torch.zeros(tokens, heads, 256, dtype=kind)[..., 192:]
    workspace = torch.empty(split_workspace_elements(heads, serving.topk, device))
    lse = torch.empty(serving.max_tokens, heads).view(-1)[: tokens * heads].view(tokens, heads)
    attended = (latent, rope), cache.view(-1, rows_wide), slots, counts, 0.06
    sparse_mla_fwd(*attended, lse=lse, workspace=workspace)
    if serving.values:
        weight = torch.zeros(heads, serving.query_nope + serving.values, 512, dtype=kind)[:, serving.query_nope :]
        out = torch.zeros(tokens, heads, serving.values, dtype=kind)
        sparse_mla_values(*attended, weight.transpose(1, 2), out, workspace=workspace)


def before_attention(serving: Serving, slots: torch.Tensor, cache: torch.Tensor) -> None:
    """Latents of all tokens, some of which are padding without a slot, and queries as a part of a product's result."""
    tokens, kind = len(slots), serving.dtype
    angles = torch.zeros(9, 64, dtype=kind)
    norms = torch.ones(serving.query_rank, dtype=kind), torch.ones(512, dtype=kind)
    latents = torch.zeros(tokens, serving.query_rank + 576, dtype=kind)
    latent_input(latents, *norms, 1e-5, slots, angles, slots[random.randint(0, tokens) :], cache)
    few, index = min(tokens, random.randint(1, BESIDE_TOKENS)), 128 + serving.index_heads
    wide = [torch.zeros(rows, serving.width, dtype=kind) for rows in (few, index)]
    place = slots[:few]
    latent_input(latents[:few], *norms, 1e-5, place, angles, place, cache, (*wide, torch.zeros(few, index, dtype=kind)))
    q = torch.zeros(tokens, serving.heads, serving.query_nope + 64, dtype=kind)
    both = torch.zeros(serving.heads, serving.query_nope + 256, 512, dtype=kind)
    query_input(q, both[:, : serving.query_nope], slots, angles, random.choice((None, lookup(serving, tokens))))
    between = torch.zeros(2, tokens, serving.width, dtype=kind)
    hidden = between[0, :MOST_TOKENS]
    row_product(hidden, torch.zeros(128 + serving.index_heads, serving.width, dtype=kind))
    row_product(hidden[:ROUTER_TOKENS], torch.zeros(serving.experts, serving.width))
    add_norm(between[0], random.choice((between[1], None)), torch.ones(serving.width, dtype=kind), 1e-5)


def lookup(serving: Serving, tokens: int) -> Lookup:
    """Of as many tokens, whose requests have any number of blocks and lie anywhere in the step's."""
    first = random.randint(0, 3)
    found, counts = torch.zeros(tokens, serving.topk, dtype=torch.int32), torch.zeros(tokens + first, dtype=torch.int32)
    table = torch.zeros(1, random.randint(9, 99), dtype=torch.int32)
    return Lookup(found, counts[first:], table, BLOCK, found.clone(), counts[first:], random.choice((64, 128)))


def score(
    serving: Serving,
    values: torch.Tensor,
    folded: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    selected: torch.Tensor,
    width: int,
    next_n: int,
) -> None:
    """Decoding rows over the paged cache, then a chunk of prefilling rows from anywhere in the step."""
    kept = torch.empty(max(1, topk_workspace_elements(64, LONG, serving.topk)), dtype=torch.int32)
    rows = min(len(lengths), 64) // next_n * next_n
    if rows:
        scores = torch.zeros(rows * width).view(rows, width)
        indexer.paged_logits(values[:rows], keys, folded[:rows], lengths[:rows], table[: rows // next_n], scores)
        select_topk(scores, lengths[:rows], serving.topk, width, selected[:rows], kept)
    first = random.randrange(len(lengths))
    part = slice(first, min(len(lengths), first + 64))
    count = part.stop - part.start
    fp8 = values.dtype == torch.float8_e4m3fn
    gathered = torch.empty(random.randint(width, width + 100), 128, dtype=values.dtype)
    scales = torch.empty(len(gathered))
    cumulative = torch.zeros(len(table) + 1, dtype=torch.int32)
    indexer.gather_index_keys(keys, table, cumulative, gathered, scales)
    scores = torch.zeros(count * width).view(count, width)
    starts, ends = torch.zeros(2, len(lengths), dtype=torch.int32)
    with_scales = scales if fp8 else None
    indexer.ragged_logits(values[part], gathered, with_scales, folded[part], starts[part], ends[part], scores)
    select_topk(scores, lengths[part], serving.topk, width, selected[part], kept)


def steps(serving: Serving) -> None:
    for _ in range(STEPS):
        tokens = random.choice((random.randint(1, 64), random.randint(1, serving.max_tokens)))
        width = random.choice((random.randint(serving.topk + 1, 9000), random.randint(serving.topk + 1, LONG)))
        step(serving, tokens, width, random.randint(1, serving.max_next_n))


def packed_many(arch: int) -> bool:
    """Many heads with one cache on one GPU, with the other on another: all four would take twice as long."""
    return arch == 90


def main() -> None:
    arch = int(sys.argv[1])
    launch_keys.pretend(arch)
    torch.bmm = lambda a, b, out: out
    random.seed(arch)
    tuning._INTERPRETED = tuning.Gpu(arch, 132, tuning.family_of(arch, tuning.SHARED_LIMIT[arch]))
    # GLM-5's rank is a multiple of 16, which hides a variant.
    inputs = FUSED | {"query_rank": 1000}
    cases = [
        Serving(heads, 32, topk, 2048, LONG, BLOCK, packed=packed, dtype=dtype, max_next_n=3, **inputs)
        for heads, topk, packed, dtype in (
            (8, 2048, False, torch.bfloat16),
            (8, 2048, True, torch.bfloat16),
            (64, 2048, packed_many(arch), torch.bfloat16),
            (2, 64, False, torch.float16),
        )
    ]
    found = [launch_keys.compare(launches(s, CPU), partial(steps, s), "selection") for s in cases]
    json.dump({kind: [line for case in found for line in case[kind]] for kind in found[0]}, sys.stdout)


if __name__ == "__main__":
    main()
