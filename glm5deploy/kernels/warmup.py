"""Every launch of attention, indexer and selection that serving will need, so that none compiles under load."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import triton

from glm5deploy.kernels import warmup_layer
from glm5deploy.kernels.attention import (
    combine_dims,
    combine_splits,
    sparse_mla_fwd,
    split_keys,
    split_workspace_elements,
)
from glm5deploy.kernels.index_input import index_input
from glm5deploy.kernels.indexer import (
    gather_index_keys,
    paged_logits,
    prepare_index_key,
    prepare_index_query,
    ragged_logits,
    store_index_keys,
)
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, INDEX_ROPE_DIM, LATENT_DIM, PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.prepare import Launch, first_of_each
from glm5deploy.kernels.slots import slots_from_positions
from glm5deploy.kernels.topk import select_topk, topk_variant, topk_workspace_elements
from glm5deploy.kernels.topk_config import MOST_SHARED_ROWS
from glm5deploy.kernels.tuning import gpu, index_value_dtype, sparse_config
from glm5deploy.kernels.value_output import MOST_ROWS, value_output, value_variant, values_fuse

# Every number of tokens up to here is launched; beyond, the first one of each configuration.
_EVERY = 128
# Between widths of rows whose selection is looked at: no variant serves fewer.
_STEP = 1024


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
    query_rank: int = 0  # latents of a query where `latent_input` norms them
    query_nope: int = 0  # dimensions of a head beside RoPE where `query_input` absorbs them
    width: int = 0  # of hidden states, where `add_norm` takes them and `step_tokens` the step's bookkeeping
    values: int = 0  # values of a head where `sparse_mla_values` multiplies with W_UV
    experts: int = 0  # whose router's logits come from `row_product`
    index_at_once: bool = False  # index queries and keys come from `row_product` and `index_input`

    def latent_block(self, device: torch.device) -> torch.Tensor:
        """A block of the latent cache, [1, block_size, row]."""
        width, dtype = (PACKED_ROW_BYTES, torch.uint8) if self.packed else (QK_DIM, self.dtype)
        return torch.zeros((1, self.block_size, width), dtype=dtype, device=device)


def launches(serving: Serving, device: torch.device) -> list[Launch]:
    """All of them, for :func:`glm5deploy.kernels.prepare.prepare`."""
    return [
        *_attention(serving, device),
        *_values(serving, device),
        *_cache(serving, device),
        *warmup_layer.launches(serving, device),
        *_queries(serving, device),
        *_scores(serving, device),
        *_selection(serving, device),
    ]


def _attention(serving: Serving, device: torch.device) -> Iterator[Launch]:
    of = gpu(device)

    def variant(tokens: int, exact: bool = False) -> Hashable:
        config = sparse_config(of, serving.packed, serving.heads, tokens)
        splits = config.splits(tokens, serving.heads, serving.topk, of.multiprocessors)
        parts = combine_splits(splits) if splits > 1 else 0
        return config, splits if exact else parts, combine_dims(tokens * serving.heads, of)

    few = range(1, min(_EVERY, serving.max_tokens) + 1)
    for tokens in sorted({*few, *first_of_each(lambda t: variant(t, exact=True), range(1, serving.max_tokens + 1))}):
        yield Launch(("attention", variant(tokens)), partial(_attend, serving, device, tokens))


def _attend(serving: Serving, device: torch.device, tokens: int) -> None:
    heads, keys = serving.heads, serving.topk
    rows = serving.latent_block(device)[0]
    q = tuple(
        torch.zeros((tokens, heads, dims), dtype=serving.dtype, device=device)
        for dims in (LATENT_DIM, QK_DIM - LATENT_DIM)
    )
    slots = torch.zeros((tokens, keys), dtype=torch.int32, device=device)
    counts = torch.zeros(tokens, dtype=torch.int32, device=device)
    lse = torch.empty((tokens, heads), device=device)
    workspace = torch.empty(split_workspace_elements(heads, keys, device, serving.packed), device=device)
    sparse_mla_fwd((q[0], q[1]), rows, slots, counts, 1.0, lse=lse, workspace=workspace)


def _values(serving: Serving, device: torch.device) -> Iterator[Launch]:
    """Attention's last launch where it multiplies with W_UV; cuBLAS's product of more tokens needs none."""
    of, heads, values = gpu(device), serving.heads, serving.values
    weight = torch.zeros((heads, values, LATENT_DIM), dtype=serving.dtype, device=device).transpose(1, 2)

    def splits(tokens: int) -> int:
        config = sparse_config(of, serving.packed, heads, tokens)
        wanted = config.splits(tokens, heads, serving.topk, of.multiprocessors)
        return split_keys(serving.topk, wanted, config.block_keys)[0]

    def multiply(tokens: int, parts: int) -> None:
        part = torch.zeros(tokens * heads * parts * LATENT_DIM, device=device)
        out = torch.empty((tokens, heads, values), dtype=serving.dtype, device=device)
        value_output(part, part[: tokens * heads * parts], parts, weight, out)

    if values:
        few = range(1, min(MOST_ROWS // heads, serving.max_tokens) + 1)
        fused = [tokens for tokens in few if values_fuse(tokens * heads, splits(tokens), weight)]
        for tokens in first_of_each(lambda t: value_variant(t * heads, splits(t), values), fused):
            variant = value_variant(tokens * heads, splits(tokens), values)
            yield Launch(("values", *variant), partial(multiply, tokens, splits(tokens)))


def _cache(serving: Serving, device: torch.device) -> Iterator[Launch]:
    """Stores into both caches, and positions to slots, for either type of integers."""

    def store(slot_type: torch.dtype) -> None:
        latents = serving.latent_block(device)
        values = torch.zeros((2, QK_DIM), dtype=serving.dtype, device=device)
        slots = torch.zeros(2, dtype=slot_type, device=device)
        store_latent(values[:, :LATENT_DIM].contiguous(), values[:, LATENT_DIM:].contiguous(), slots, latents)
        keys = torch.zeros((1, serving.block_size, INDEX_KEY_BYTES), dtype=torch.uint8, device=device)
        store_index_keys(keys, values[:, :INDEX_DIM].contiguous(), slots)
        selected = torch.zeros((2, serving.topk), dtype=torch.int32, device=device)
        counts = torch.zeros(2, dtype=torch.int32, device=device)
        table = torch.zeros((1, 1), dtype=torch.int32, device=device)
        slots_from_positions(selected, slots, table, serving.block_size, selected.clone(), counts)

    for slot_type in (torch.int64, torch.int32):
        yield Launch(("cache", slot_type), partial(store, slot_type))


def _queries(serving: Serving, device: torch.device) -> Iterator[Launch]:
    def prepare(position_type: torch.dtype, angle_type: torch.dtype) -> None:
        query = torch.zeros((1, serving.index_heads, INDEX_DIM), dtype=serving.dtype, device=device)
        values = torch.empty_like(query, dtype=index_value_dtype(gpu(device)))
        weights = torch.zeros((1, serving.index_heads), device=device)
        cos_sin = torch.zeros((1, INDEX_ROPE_DIM), dtype=angle_type, device=device)
        positions = torch.zeros(1, dtype=position_type, device=device)
        prepare_index_query(query, weights.to(serving.dtype), positions, cos_sin, 1.0, values, weights)
        key, norm = query[:, 0], torch.zeros(INDEX_DIM, device=device)
        prepare_index_key(key, norm, norm, 1e-6, positions, cos_sin, torch.empty_like(key))
        if serving.index_at_once:
            cache = torch.zeros((1, serving.block_size, INDEX_KEY_BYTES), dtype=torch.uint8, device=device)
            slots, heads = torch.zeros(1, dtype=torch.int64, device=device), weights.to(serving.dtype)
            step = (query, key, heads, (norm, norm, 1e-6), positions, cos_sin, 1.0, slots, cache)
            index_input(*step, values, weights)

    for position_type in (torch.int64, torch.int32):
        for angle_type in (serving.dtype, torch.float32):  # vLLM keeps angles in either
            yield Launch(("query and key", position_type, angle_type), partial(prepare, position_type, angle_type))


def _scores(serving: Serving, device: torch.device) -> Iterator[Launch]:
    value_type = index_value_dtype(gpu(device))
    has_scales = value_type == torch.float8_e4m3fn
    ones = torch.ones(1, dtype=torch.int32, device=device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    cache = torch.zeros((1, serving.block_size, INDEX_KEY_BYTES), dtype=torch.uint8, device=device)

    def queries(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.zeros((rows, serving.index_heads, INDEX_DIM), dtype=serving.dtype, device=device).to(value_type)
        return values, torch.zeros((rows, serving.index_heads), device=device)

    def ragged() -> None:
        values, weights = queries(1)
        keys = torch.zeros((1, INDEX_DIM), dtype=serving.dtype, device=device).to(value_type)
        scales = torch.zeros(1, device=device)
        gather_index_keys(cache, table, torch.arange(2, dtype=torch.int32, device=device), keys, scales)
        scores = torch.zeros((1, 16), device=device)
        ragged_logits(values, keys, scales if has_scales else None, weights, torch.zeros_like(ones), ones, scores)

    def paged(next_n: int) -> None:
        values, weights = queries(next_n)
        scores = torch.zeros((next_n, 16), device=device)
        lengths = torch.ones(next_n, dtype=torch.int32, device=device)
        paged_logits(values, cache, weights, lengths, table, scores)

    yield Launch(("prefill scores",), ragged)
    for next_n in sorted({triton.next_power_of_2(n) for n in range(1, serving.max_next_n + 1)}):
        yield Launch(("decode scores", next_n), partial(paged, next_n))


def _selection(serving: Serving, device: torch.device) -> Iterator[Launch]:
    of, k, longest = gpu(device), serving.topk, serving.max_length

    def select(rows: int, width: int) -> None:
        # All rows are the same memory, of which nothing is read: none has columns. None of them begins within 16 bytes
        # either; where a step's do, up to three columns in front count as columns.
        logits = torch.zeros((1, triton.cdiv(width, 4) * 4), device=device).expand(rows, -1)
        width += 3 if width % 4 else 0
        lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        out = torch.empty((rows, k), dtype=torch.int32, device=device)
        workspace = torch.empty(topk_workspace_elements(rows, width, k), dtype=torch.int32, device=device)
        select_topk(logits, lengths, k, width, out, workspace)

    # Rows that begin within 16 bytes, as they do in the longest widths, can need more.
    widths = {*range(k + 1, longest, _STEP), *range(max(1, longest - 3), longest + 1)}
    few = range(1, min(serving.max_tokens, MOST_SHARED_ROWS + 1) + 1)
    launches = {topk_variant(rows, width, k, width, of): (rows, width) for width in sorted(widths) for rows in few}
    for variant, (rows, width) in launches.items():
        yield Launch(("selection", *variant), partial(select, rows, width))
