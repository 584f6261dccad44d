"""Launches every kernel that serving will need, once, so that none compiles under load or inside a graph capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from glm5deploy.kernels.attention import combine_dims, combine_splits, sparse_mla_fwd, split_workspace_elements
from glm5deploy.kernels.compile_counter import CompileCounter
from glm5deploy.kernels.indexer import (
    gather_index_keys,
    paged_logits,
    prepare_index_query,
    ragged_logits,
    store_index_keys,
)
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, INDEX_ROPE_DIM, LATENT_DIM, PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.slots import slots_from_positions
from glm5deploy.kernels.sparse_mla import combine_splits_kernel
from glm5deploy.kernels.topk import BLOCK_COLUMNS, select_topk, topk_workspace_elements
from glm5deploy.kernels.tuning import gpu, index_value_dtype, sparse_rows


@dataclass(frozen=True, slots=True)
class Serving:
    """What decides which kernels are needed."""

    heads: int  # attention heads of this rank
    index_heads: int
    topk: int
    max_tokens: int  # of one step
    max_length: int  # of a context
    block_size: int  # tokens of a cache block
    packed: bool  # fp8_ds_mla
    dtype: torch.dtype = torch.bfloat16
    max_next_n: int = 1  # query tokens of a decoding request, more than one with speculative decoding


def warm_up(serving: Serving, device: torch.device) -> list[str]:
    """Compile, or load from the cache on disk, what `serving` needs; returns the kernels' names for the log."""
    with CompileCounter() as counter:
        _warm_attention(serving, device)
        _warm_indexer(serving, device)
        _warm_topk(serving, device)
    torch.cuda.synchronize(device)
    return counter.names


def _warm_attention(serving: Serving, device: torch.device) -> None:
    of = gpu(device)
    heads, keys = serving.heads, serving.topk
    width = PACKED_ROW_BYTES if serving.packed else QK_DIM
    cache_type = torch.uint8 if serving.packed else serving.dtype
    cache = torch.zeros((1, serving.block_size, width), dtype=cache_type, device=device)
    latent = torch.zeros((2, LATENT_DIM), dtype=serving.dtype, device=device)
    rope = torch.zeros((2, QK_DIM - LATENT_DIM), dtype=serving.dtype, device=device)
    for slot_type in (torch.int64, torch.int32):
        store_latent(latent, rope, torch.zeros(2, dtype=slot_type, device=device), cache)
    workspace = torch.empty(split_workspace_elements(heads, keys, device, serving.packed), device=device)
    low = 0
    for row in sparse_rows(of, serving.packed, heads):
        # Both ends of the row's token range: splitting may begin or end inside it.
        tokens = {low + 1, min(row.max_tokens, serving.max_tokens)}
        for count in sorted(t for t in tokens if low < t <= serving.max_tokens):
            for splits in {1, row.config.splits(count, heads, keys, of.multiprocessors)}:
                # Every specialisation is the same for two tokens as for many.
                few = min(count, 2)
                q = torch.zeros((few, heads, QK_DIM), dtype=serving.dtype, device=device)
                slots = torch.zeros((few, keys), dtype=torch.int32, device=device)
                counts = torch.zeros(few, dtype=torch.int32, device=device)
                parts = (q[..., :LATENT_DIM].contiguous(), q[..., LATENT_DIM:].contiguous())
                sparse_mla_fwd(
                    parts, cache[0], slots, counts, 1.0, workspace=workspace, config=row.config, splits=splits
                )
        low = row.max_tokens
        if low >= serving.max_tokens:
            break
    _warm_combine(serving, device)


def _warm_combine(serving: Serving, device: torch.device) -> None:
    of = gpu(device)
    partial = torch.zeros(64 * LATENT_DIM, device=device)
    partial_lse = torch.zeros(64, device=device)
    out = torch.zeros(LATENT_DIM, dtype=serving.dtype, device=device)
    lse = torch.zeros(1, device=device)
    for splits in (2, 16, 64):
        for dims in {combine_dims(1, of), combine_dims(1 << 30, of)}:
            grid = (1, LATENT_DIM // dims)
            combine_splits_kernel[grid](
                partial, partial_lse, out, lse, splits, BS=combine_splits(splits), BD=dims, num_warps=4
            )


def _warm_indexer(serving: Serving, device: torch.device) -> None:
    heads = serving.index_heads
    value_type = index_value_dtype(gpu(device))
    cache = torch.zeros((1, serving.block_size, INDEX_KEY_BYTES), dtype=torch.uint8, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    cos_sin = torch.zeros((1, INDEX_ROPE_DIM), dtype=serving.dtype, device=device)
    ends = torch.ones(1, dtype=torch.int32, device=device)
    for position_type in (torch.int64, torch.int32):
        zeros = torch.zeros(1, dtype=position_type, device=device)
        query = torch.zeros((1, heads, INDEX_DIM), dtype=serving.dtype, device=device)
        values = torch.empty_like(query, dtype=value_type)
        weights = torch.zeros((1, heads), device=device)
        prepare_index_query(query, weights.to(serving.dtype), zeros, cos_sin, 1.0, values, weights)
        store_index_keys(cache, query[:, 0], zeros)
        slots = torch.zeros((1, serving.topk), dtype=torch.int32, device=device)
        slots_from_positions(slots, zeros, table, serving.block_size, slots.clone(), ends.clone())
    keys = torch.zeros((1, INDEX_DIM), dtype=value_type, device=device)
    scales = torch.zeros(1, device=device)
    cumulative = torch.tensor([0, 1], dtype=torch.int32, device=device)
    gather_index_keys(cache, table, cumulative, keys, scales)
    logits = torch.zeros((1, 16), device=device)
    ragged_logits(
        values,
        keys,
        scales if value_type == torch.float8_e4m3fn else None,
        weights,
        torch.zeros_like(ends),
        ends,
        logits,
    )
    for next_n in sorted({triton.next_power_of_2(n) for n in range(1, serving.max_next_n + 1)}):
        many = values.expand(next_n, heads, INDEX_DIM).contiguous()
        rows = torch.zeros((next_n, 16), device=device)
        paged_logits(many, cache, weights.expand(next_n, heads).contiguous(), ends.expand(next_n), table, rows)


def _warm_topk(serving: Serving, device: torch.device) -> None:
    # One block and more than one; each with rows that start at multiples of 16 bytes and not.
    lengths = [16, 17]
    lengths += [BLOCK_COLUMNS + 16, BLOCK_COLUMNS + 17] if serving.max_length > BLOCK_COLUMNS else []
    for length in lengths:
        logits = torch.zeros((1, length), device=device)
        sizes = torch.full((1,), length, dtype=torch.int32, device=device)
        out = torch.empty((1, serving.topk), dtype=torch.int32, device=device)
        elements = max(1, topk_workspace_elements(1, length, serving.topk))
        workspace = torch.empty(elements, dtype=torch.int32, device=device)
        select_topk(logits, sizes, serving.topk, length, out, workspace)
