"""The operation behind the indexer: store this step's keys, score, select. Opaque to torch.compile and CUDA graphs."""

# No `from __future__ import annotations` here: torch derives the operation's schema from annotations that are objects.
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from glm5deploy.kernels.reference import indexer_logits, load_index_keys, select_topk, store_index_keys
from glm5deploy.vllm_plugin import trace
from glm5deploy.vllm_plugin.metadata import SparseMetadata

# fp32 scores of one chunk of queries: 16 Mi are 64 MiB.
_MOST_SCORES = 1 << 24


@eager_break_during_capture  # type: ignore[untyped-decorator]
def glm5_select(
    q: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    selected: torch.Tensor,
    topk: int,
    layer_name: LayerNameType,
) -> None:
    """Store the step's keys, then write each token's best ``topk`` positions into ``selected``.

    q [T, J, 128] e4m3, key [T, 128], weights [T, J] fp32 with the query's scale in them, selected int32 [most, topk].
    """
    layer = _resolve_layer_name(layer_name)
    metadata, cache = _context(layer)
    selected[: q.shape[0]] = -1
    if metadata is None:  # the profiling run
        return
    tokens = metadata.num_actual_tokens
    store_index_keys(cache, key[:tokens], metadata.slot_mapping[:tokens])
    select(q, weights, cache, metadata, selected, topk)
    trace.count(layer, metadata, topk)
    trace.record(layer, metadata, selected[:tokens])


def _context(layer: str) -> tuple[SparseMetadata | None, torch.Tensor]:
    context = get_forward_context()
    step: Any = context.attn_metadata
    if isinstance(step, list):
        step = step[0]
    cache = context.no_compile_layers[layer].kv_cache
    return (step[layer] if isinstance(step, dict) else None), cache


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: SparseMetadata,
    selected: torch.Tensor,
    topk: int,
) -> None:
    """Select for every token of the step, request by request, with the torch reference.

    cache uint8 [blocks, block size, 132] holds the keys of every request's context; ``selected`` is written in place.
    """
    assert metadata.spans is not None
    block_size = cache.shape[1]
    for request, (start, end, context) in enumerate(metadata.spans):
        if end == start:
            continue
        position = torch.arange(context)
        slots = metadata.block_table[request, position // block_size].long() * block_size + position % block_size
        keys = load_index_keys(cache, slots)
        chunk = max(1, _MOST_SCORES // context)
        for first in range(start, end, chunk):
            part = slice(first, min(first + chunk, end))
            logits = indexer_logits(q[part], keys, weights[part])
            selected[part] = select_topk(logits, metadata.lengths[part], topk)


def _fake(
    q: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    selected: torch.Tensor,
    topk: int,
    layer_name: LayerNameType,
) -> None:
    return None


direct_register_custom_op(op_name="glm5_select", op_func=glm5_select, mutates_args=["selected"], fake_impl=_fake)
OP = torch.ops.vllm.glm5_select
