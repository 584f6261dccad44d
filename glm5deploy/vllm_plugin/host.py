"""The CPU path of the indexer: the torch references, request by request."""

from __future__ import annotations

import torch

from glm5deploy.kernels.reference import (
    indexer_logits,
    load_index_keys,
    prepare_index_key,
    prepare_index_query,
    select_topk,
    store_index_keys,
)
from glm5deploy.vllm_plugin.metadata import SparseMetadata


def profile(device: torch.device) -> None:
    """Nothing is compiled on a CPU."""


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
    """Norm, rotate and store the index keys [T, 128], prepare the queries: values [T, J, 128], weights fp32 [T, J]."""
    store_index_keys(cache, prepare_index_key(key, *norm, positions, cos_sin), slots)
    return prepare_index_query(q, weights, positions, cos_sin, factor)


# fp32 scores of one chunk of queries: 16 Mi are 64 MiB.
_MOST_SCORES = 1 << 24


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: SparseMetadata,
    selected: torch.Tensor,
    topk: int,
) -> None:
    """`selection.select` with the torch references."""
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
