"""What the launches on index queries, index keys and their cache demand of their tensors."""

from __future__ import annotations

import torch

from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, INDEX_ROPE_DIM, require


def check_query(
    q: torch.Tensor, weights: torch.Tensor, cos_sin: torch.Tensor, values: torch.Tensor, weights_out: torch.Tensor
) -> bool:
    """Whether values are e4m3; ValueError where the launches cannot read q or the rest, or write the results."""
    heads, width = q.shape[1:]
    require(width == INDEX_DIM and q.stride(2) == 1, f"q must be [T, J, {INDEX_DIM}] with unit stride")
    require(heads & (heads - 1) == 0, f"index heads must be a power of two, got {heads}")
    require(cos_sin.shape[1] == INDEX_ROPE_DIM and cos_sin.is_contiguous(), f"cos_sin must be [P, {INDEX_ROPE_DIM}]")
    require(weights.stride(1) == 1, "weights must have unit column stride")
    require(values.is_contiguous() and weights_out.is_contiguous(), "outputs must be contiguous")
    return values.dtype == torch.float8_e4m3fn


def check_key(k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """ValueError where the launches cannot read index keys or their norm."""
    require(k.shape[1] == INDEX_DIM and k.stride(1) == 1, f"k must be [T, {INDEX_DIM}] with unit column stride")
    require(cos_sin.shape[1] == INDEX_ROPE_DIM and cos_sin.is_contiguous(), f"cos_sin must be [P, {INDEX_ROPE_DIM}]")
    require(weight.shape == bias.shape == (INDEX_DIM,), f"weight and bias must be [{INDEX_DIM}]")
    require(weight.is_contiguous() and bias.is_contiguous(), "weight and bias must be contiguous")


def check_cache(cache: torch.Tensor) -> None:
    """ValueError where a tensor is no cache of index keys."""
    width = cache.shape[2]
    require(cache.dtype == torch.uint8, "index-key cache must be uint8")
    require(width == INDEX_KEY_BYTES, f"index-key cache must be [blocks, block_size, {INDEX_KEY_BYTES}], got {width}")
    require(cache.stride(1) == width and cache.stride(2) == 1, "tokens of a block must be adjacent")
