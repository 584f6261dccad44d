"""The GPU path: scratch memory allocated once with the model, and one step's launches in terms of it.

Decoding requests, all of one query length, are scored over the paged key cache; their launches depend only on counts
that a CUDA graph fixes. Prefilling requests have their keys gathered and are scored in the chunks that
:mod:`glm5deploy.vllm_plugin.score_plan` made when the step's metadata was built.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from glm5deploy.kernels import index_input as index_input_kernels
from glm5deploy.kernels import indexer as index_kernels
from glm5deploy.kernels.attention import sparse_mla_fwd, sparse_mla_values, split_workspace_elements
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.layout import INDEX_DIM
from glm5deploy.kernels.slots import Lookup, slots_from_positions
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.tuning import gpu, index_value_dtype
from glm5deploy.kernels.warmup import Serving
from glm5deploy.vllm_plugin import readiness
from glm5deploy.vllm_plugin.score_plan import SCORES, rows_at_once

__all__ = [
    "attend",
    "attend_values",
    "index_input",
    "look_up",
    "profile",
    "reserve",
    "resolve_slots",
    "select",
    "store_latent",
]

if TYPE_CHECKING:
    from glm5deploy.vllm_plugin.metadata import PlannedChunk, SparseMetadata


class Scratch:
    """Memory that every layer of every model on one GPU shares: no step allocates any of it again."""

    def __init__(self, serving: Serving, device: torch.device) -> None:
        self.serving = serving
        self.warm = False
        self.resolved: tuple[object, int, int, int] | None = None
        values = index_value_dtype(gpu(device))
        tokens, context, topk = serving.max_tokens, serving.max_length, serving.topk

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.query = empty(tokens, serving.index_heads, INDEX_DIM, dtype=values)
        self.index_key = empty(tokens, INDEX_DIM, dtype=serving.dtype)
        self.query_weights = empty(tokens, serving.index_heads, dtype=torch.float32)
        self.keys = empty(context, INDEX_DIM, dtype=values)
        self.key_scales = empty(context, dtype=torch.float32)
        self.scores = empty(max(SCORES, context), dtype=torch.float32)
        self.kept = empty(topk_workspace_elements(rows_at_once(1), context, topk), dtype=torch.int32)
        self.positions = torch.arange(topk, dtype=torch.int32, device=device)
        self.none = torch.tensor(-1, dtype=torch.int32, device=device)
        self.slots = empty(tokens, topk, dtype=torch.int32)
        self.counts = empty(tokens, dtype=torch.int32)
        self.lse = empty(tokens, serving.heads, dtype=torch.float32)
        self.partial = empty(split_workspace_elements(serving.heads, topk, device), dtype=torch.float32)


_scratch: dict[torch.device, Scratch] = {}


def reserve(serving: Serving, device: torch.device) -> Scratch:
    """The device's scratch memory, made (or made larger) for ``serving``; called while models are built."""
    device = _indexed(device)
    held = _scratch.get(device)
    if held is None:
        readiness.begin(device)
    wanted = serving if held is None else _both(held.serving, serving)
    if held is None or wanted != held.serving:
        _scratch[device] = Scratch(wanted, device)
    return _scratch[device]


def _both(one: Serving, other: Serving) -> Serving:
    """What a target and its draft model need together; they share types and cache layout."""
    sizes = ["heads", "index_heads", "topk", "max_tokens", "max_length", "max_next_n"]
    sizes += ["query_rank", "query_nope", "width", "values", "index_at_once"]
    return replace(one, **{size: max(getattr(one, size), getattr(other, size)) for size in sizes})


def scratch(device: torch.device) -> Scratch:
    """What :func:`reserve` made for the device."""
    return _scratch[_indexed(device)]


def _indexed(device: torch.device) -> torch.device:
    """The current GPU where a GPU is named without its number."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def profile(device: torch.device) -> None:
    """vLLM's profiling run: compile or load every kernel that serving needs, once, before any graph is captured."""
    own = scratch(device)
    if not own.warm:
        own.warm = True
        readiness.warm_up(own.serving, device)


def index_input(
    q: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    factor: float,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, rotate and store the index keys, prepare the queries; in one launch where the engine fuses them.

    q [T, J, 128], key [T, 128], weights [T, J], the key's LayerNorm (weight and bias [128], eps), positions and slots
    int [T], cos_sin [P, 64], cache uint8 [blocks, block size, 132] -> values [T, J, 128] and weights fp32 [T, J], as
    `reference.prepare_index_query` gives them, in scratch memory.
    """
    own, tokens = scratch(q.device), q.shape[0]
    values, folded = own.query[:tokens], own.query_weights[:tokens]
    if own.serving.index_at_once:
        return index_input_kernels.index_input(
            q, key, weights, norm, positions, cos_sin, factor, slots, cache, values, folded
        )
    normed = index_kernels.prepare_index_key(key, *norm, positions, cos_sin, own.index_key[:tokens])
    index_kernels.store_index_keys(cache, normed, slots)
    return index_kernels.prepare_index_query(q, weights, positions, cos_sin, factor, values, folded)


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: SparseMetadata,
    selected: torch.Tensor,
    topk: int,
) -> None:
    """Write each token's best ``topk`` positions, ascending and -1 padded, into ``selected`` int32 [most, >= topk].

    q [T, J, 128] and weights [T, J] as :func:`index_input` gives them, cache uint8 [blocks, block size, 132].
    """
    tokens = metadata.num_actual_tokens
    if metadata.max_seq_len <= topk:
        _select_all(metadata.lengths[:tokens], selected[:tokens, :topk], scratch(q.device))
        return
    if metadata.scored_decodes:
        _select_decodes(q, weights, cache, metadata, selected[:, :topk])
    for chunk in metadata.chunks:
        _select_chunk(q, weights, cache, metadata, selected[:, :topk], chunk)


def _select_all(lengths: torch.Tensor, selected: torch.Tensor, own: Scratch) -> None:
    """No context exceeds topk: every position is selected, and nothing needs a score."""
    positions = own.positions[: selected.shape[1]]
    torch.where(positions[None, :] < lengths[:, None], positions, own.none, out=selected)


def _select_decodes(
    q: torch.Tensor, weights: torch.Tensor, cache: torch.Tensor, metadata: SparseMetadata, selected: torch.Tensor
) -> None:
    own = scratch(q.device)
    next_n = metadata.scored_rows // metadata.scored_decodes
    width = metadata.max_seq_len
    step = max(1, rows_at_once(width) // next_n)
    for request in range(0, metadata.scored_decodes, step):
        last_request = min(metadata.scored_decodes, request + step)
        rows = slice(request * next_n, last_request * next_n)
        count = rows.stop - rows.start
        scores = own.scores[: count * width].view(count, width)
        index_kernels.paged_logits(
            q[rows],
            cache,
            weights[rows],
            metadata.lengths[rows],
            metadata.block_table[request:last_request],
            scores,
        )
        select_topk(scores, metadata.lengths[rows], selected.shape[1], width, selected[rows], own.kept)


def _select_chunk(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: SparseMetadata,
    selected: torch.Tensor,
    planned: PlannedChunk,
) -> None:
    own = scratch(q.device)
    chunk, rows = planned.chunk, slice(planned.chunk.first, planned.chunk.last)
    topk = selected.shape[1]
    if not chunk.scored:
        _select_all(metadata.lengths[rows], selected[rows], own)
        return
    keys, scales = own.keys[: chunk.keys], own.key_scales[: chunk.keys]
    if chunk.gather:
        table = metadata.block_table[chunk.request : chunk.last_request]
        index_kernels.gather_index_keys(cache, table, planned.cumulative, keys, scales)
    count = chunk.last - chunk.first
    scores = own.scores[: count * chunk.width].view(count, chunk.width)
    with_scales = scales if keys.dtype == torch.float8_e4m3fn else None
    index_kernels.ragged_logits(q[rows], keys, with_scales, weights[rows], planned.starts, planned.ends, scores)
    select_topk(scores, metadata.lengths[rows], topk, chunk.width, selected[rows], own.kept)


def attend(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, 576] (or its two parts) over latent rows [N, 576] or packed [N, 656] -> out [T, H, 512], lse [T, H]."""
    first = q[0] if isinstance(q, tuple) else q
    own = scratch(first.device)
    tokens, heads = first.shape[0], first.shape[1]
    lse = own.lse.view(-1)[: tokens * heads].view(tokens, heads)
    return sparse_mla_fwd(q, rows, slots, counts, scale, lse=lse, workspace=own.partial)


def attend_values(
    q: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
    weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """:func:`attend`, then times W_UV: ``weight`` [H, 512, V], ``out`` [T, H, V]."""
    sparse_mla_values(q, rows, slots, counts, scale, weight, out, workspace=scratch(out.device).partial)


def look_up(
    selected: torch.Tensor, metadata: SparseMetadata, block_size: int, block_stride: int, *, fresh: bool
) -> Lookup | None:
    """What is to be looked up, in the next launch, before attention can run; None where that has been done.

    A layer with its own selection resolves it (``fresh``); the layers that share it take over what it resolved, as long
    as their cache has the same blocks, though vLLM makes metadata of their own for them.
    """
    own, tokens = scratch(selected.device), selected.shape[0]
    step, *size = own.resolved or (None,)
    # A draft model's steps come in one object, whose longest context grows by a token each time.
    if not fresh and step is metadata.step and size == [metadata.max_seq_len, tokens, block_stride]:
        return None
    own.resolved = (metadata.step, metadata.max_seq_len, tokens, block_stride)
    requests, found = metadata.request_of_token[:tokens], _looked_up(own, selected)
    return Lookup(selected, requests, metadata.block_table, block_size, *found, block_stride)


def _looked_up(own: Scratch, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, topk = selected.shape
    return own.slots.view(-1)[: tokens * topk].view(tokens, topk), own.counts[:tokens]


def resolve_slots(
    selected: torch.Tensor, metadata: SparseMetadata, block_size: int, block_stride: int, *, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical rows int32 [T, K] of the selected positions and how many there are, in scratch memory.

    In a launch of its own where :func:`look_up` has something to look up.
    """
    lookup = look_up(selected, metadata, block_size, block_stride, fresh=fresh)
    if lookup is not None:
        slots_from_positions(*lookup)
    return _looked_up(scratch(selected.device), selected)
