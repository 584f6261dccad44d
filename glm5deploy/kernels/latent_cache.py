"""Writes the latent cache: plain rows of 576, or packed rows of 656 bytes (`fp8_ds_mla`)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.fp8 import quantise_latent
from glm5deploy.kernels.layout import LATENT_DIM, PACKED_ROW_BYTES, QK_DIM, ROPE_DIM, require

ROPE_DTYPE = torch.bfloat16
"""Of the RoPE part of packed rows, whatever type the model computes in."""


@triton.jit
def store_latent_row(
    b_latent,  # [4, 128]
    cache,
    cache_scales,
    i_slot,  # int64
    stride_block,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """The 512 latent values of a slot, and in packed rows their scales."""
    o_g = tl.arange(0, 4)
    o_d = o_g[:, None] * 128 + tl.arange(0, 128)[None, :]  # [4, 128]
    o_base = i_slot // BLOCK * stride_block
    if PACKED:
        o_row = o_base + i_slot % BLOCK * 656
        b_code, b_scale = quantise_latent(b_latent.to(tl.float32))
        tl.store(cache + o_row + o_d, b_code)
        tl.store(cache_scales + o_row // 4 + 128 + o_g, b_scale)
    else:
        o_row = o_base + i_slot % BLOCK * 576
        tl.store(cache + o_row + o_d, b_latent.to(cache.dtype.element_ty))


@triton.jit
def rope_offset(i_slot, stride_block, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    """Where a slot's 64 RoPE values begin, counted in their own type."""
    o_row = i_slot // BLOCK * stride_block + i_slot % BLOCK * (656 if PACKED else 576)
    return o_row // 2 + 264 if PACKED else o_row + 512


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store_latent_kernel(
    latent,  # [T, 512]
    rope,  # [T, 64]
    slots,  # int [T], block * block_size + offset; negative ones are skipped
    cache,  # plain: the cache's type; packed: uint8
    cache_scales,  # packed cache seen as fp32
    cache_ropes,  # packed cache seen as bf16
    stride_latent,
    stride_rope,
    stride_block,  # elements (plain) or bytes (packed) between two blocks
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_slot = tl.load(slots + i_t).to(tl.int64)
    if i_slot < 0:
        return
    o_r = tl.arange(0, 64)
    o_d = tl.arange(0, 4)[:, None] * 128 + tl.arange(0, 128)[None, :]
    b_latent = tl.load(latent + i_t * stride_latent + o_d)
    b_rope = tl.load(rope + i_t * stride_rope + o_r)
    store_latent_row(b_latent, cache, cache_scales, i_slot, stride_block, BLOCK, PACKED)
    p_rope = cache_ropes + rope_offset(i_slot, stride_block, BLOCK, PACKED)
    tl.store(p_rope + o_r, b_rope.to(cache_ropes.dtype.element_ty))


def store_latent(
    latent: torch.Tensor,
    rope: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
) -> None:
    """Write latent [T, 512] and rope [T, 64] at slots [T] of a paged cache, in place.

    cache: [blocks, block_size, 576] of a float type, or uint8 [blocks, block_size, 656] in the packed layout; blocks
    may lie further apart than their size. T is slots' length: longer inputs are padding.
    """
    tokens = slots.shape[0]
    packed, scales, ropes = cache_views(cache)
    require(latent.shape[1] == LATENT_DIM and rope.shape[1] == ROPE_DIM, "latent must be [T, 512] and rope [T, 64]")
    require(latent.stride(1) == rope.stride(1) == 1, "latent and rope must have unit column stride")
    if tokens == 0:
        return
    store_latent_kernel[(tokens,)](
        latent,
        rope,
        slots,
        cache,
        scales,
        ropes,
        token_stride(latent),
        token_stride(rope),
        cache.stride(0),
        BLOCK=cache.shape[1],
        PACKED=packed,
        num_warps=4 if packed else 1,  # a warp for each group whose scale is searched for
    )


def cache_views(cache: torch.Tensor) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Whether rows are packed, and what kernels take scales and RoPE values of such rows for; ValueError otherwise."""
    packed = cache.dtype == torch.uint8
    width = PACKED_ROW_BYTES if packed else QK_DIM
    require(cache.shape[2] == width and cache.stride(1) == width, f"cache rows must be {width} wide and adjacent")
    if not packed:
        return packed, cache, cache
    return packed, byte_view(cache, torch.float32), byte_view(cache, ROPE_DTYPE)


def byte_view(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A one-dimensional view of a uint8 cache's memory as another type; only its address and type are meant."""
    start = cache.storage_offset()
    require(start % dtype.itemsize == 0 and cache.stride(0) % dtype.itemsize == 0, "cache is not aligned for its views")
    return cache.as_strided((dtype.itemsize,), (1,), start).view(dtype)


def token_stride(tensor: torch.Tensor) -> int:
    """Stride of the first dimension; for a single token any multiple of 16, so that its kernel is the others' too."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 16
