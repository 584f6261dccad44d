"""What follows the first product of a layer's attention, in one launch instead of three and the key's part of a fourth.

That product gives each token the query's latent, the key's latent and the key's 64 RoPE values side by side. Both
latents are normed, the RoPE values rotated, and the key's part is stored into the latent cache. In a layer that selects
the same launch may multiply hidden states for the indexer, which depends on nothing but these.

Numbers are rounded where vLLM 0.32 and 0.33 round them on CUDA: a norm computes in fp32 and rounds its result once,
RoPE likewise with cosines and sines in the model's type; a packed row is quantised from the rounded latent.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, let_next_begin, wait_for_previous
from glm5deploy.kernels.latent_cache import cache_views, rope_offset, store_latent_row
from glm5deploy.kernels.layout import LATENT_DIM, QK_DIM, ROPE_DIM, require, row_tile
from glm5deploy.kernels.reference import rope_interleaved
from glm5deploy.kernels.rope import rotate_pairs
from glm5deploy.kernels.row_product import BESIDE_TOKENS, check_rows, two_columns

_WARPS = 4


@triton.jit(do_not_specialize=["stored", "outputs"], do_not_specialize_on_alignment=["positions", "slots"])
def latent_input_kernel(
    x,  # [T, RANK + 576]
    q_weight,  # [RANK]
    kv_weight,  # [512]
    positions,  # int [T]
    cos_sin,  # [P, 64]: 32 cosines, then 32 sines
    slots,  # int [stored]; negative ones are skipped
    q_out,  # [T, RANK]
    cache,  # these three as in `store_latent_kernel`
    cache_scales,
    cache_ropes,
    hidden,  # [T, K]; it and the next two are read and written with BT
    weight,  # [outputs, K]
    product,  # [T, outputs]
    eps,
    stored,
    outputs,
    stride_x,
    stride_block,
    RANK: tl.constexpr,
    BR: tl.constexpr,  # at least RANK
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,  # T, or a power of two that is at least T; or 0
    BW: tl.constexpr,  # BW * BC are at least K
    BC: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (T, 2, and with BT outputs / 2T): the query's part, the key's, and two columns of the product a program."""
    i_t = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(1)
    p_x = x + i_t * stride_x
    if i_p > 1:
        if BT > 0:
            tokens = tl.num_programs(0)
            i_n = ((i_p - 2) * tokens + i_t) * 2
            if i_n < outputs:
                two_columns(hidden, weight, product, i_n, tokens, outputs, K, BT, BW, BC, CHAINED)
    elif i_p == 0:
        o_r = tl.arange(0, BR)
        m_r = o_r < RANK
        # Volatile loads keep their order: the compiler would start the weight's, from memory, behind the squares.
        b_weight = tl.load(q_weight + o_r, mask=m_r, other=0.0, volatile=True).to(tl.float32)
        wait_for_previous(CHAINED)
        let_next_begin(CHAINED)
        b_q = tl.load(p_x + o_r, mask=m_r, other=0.0, volatile=True).to(tl.float32)
        b_q = b_q * tl.rsqrt(tl.sum(b_q * b_q, axis=0) / RANK + eps) * b_weight
        tl.store(q_out + i_t * RANK + o_r, b_q.to(q_out.dtype.element_ty), mask=m_r)
    elif i_t < stored:
        # All loads at once, also for a token without a slot: waiting for the slot first would take as long again.
        o_d = tl.arange(0, 4)[:, None] * 128 + tl.arange(0, 128)[None, :]
        b_weight = tl.load(kv_weight + o_d, volatile=True).to(tl.float32)
        wait_for_previous(CHAINED)
        let_next_begin(CHAINED)
        i_slot = tl.load(slots + i_t).to(tl.int64)
        p_angle = cos_sin + tl.load(positions + i_t).to(tl.int64) * 64 + tl.arange(0, 32)
        o_even = 2 * tl.arange(0, 32)
        b_latent = tl.load(p_x + RANK + o_d).to(tl.float32)
        b_even = tl.load(p_x + (RANK + 512) + o_even).to(tl.float32)
        b_odd = tl.load(p_x + (RANK + 513) + o_even).to(tl.float32)
        b_cos = tl.load(p_angle).to(tl.float32)
        b_sin = tl.load(p_angle + 32).to(tl.float32)
        b_mean = tl.sum(tl.sum(b_latent * b_latent, axis=1), axis=0) / 512
        b_latent = (b_latent * tl.rsqrt(b_mean + eps) * b_weight).to(x.dtype.element_ty)
        b_first, b_second = rotate_pairs(b_even, b_odd, b_cos, b_sin)
        b_first = b_first.to(x.dtype.element_ty)
        b_second = b_second.to(x.dtype.element_ty)
        if i_slot >= 0:
            store_latent_row(b_latent, cache, cache_scales, i_slot, stride_block, BLOCK, PACKED)
            p_rope = cache_ropes + rope_offset(i_slot, stride_block, BLOCK, PACKED) + o_even
            tl.store(p_rope, b_first.to(cache_ropes.dtype.element_ty))
            tl.store(p_rope + 1, b_second.to(cache_ropes.dtype.element_ty))


def latent_input(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor,
    cache: torch.Tensor,
    beside: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Normed query latents [T, R] of x's type; the keys' rows go to ``slots`` int [S] of ``cache``, in place.

    ``beside``: hidden states [T, K] of at most `row_product.BESIDE_TOKENS` tokens, a weight [N, K], and where their
    product [T, N] goes, as :func:`~glm5deploy.kernels.row_product.row_product` gives it.

    x [T, R + 576]; weights [R] and [512] of the two norms, eps of both; positions int [T]; cos_sin [P, 64] (cosines,
    then sines); cache as in :func:`~glm5deploy.kernels.latent_cache.store_latent`. S <= T: later tokens are padding and
    store nothing, like negative slots.
    """
    tokens, rank = x.shape[0], q_weight.shape[0]
    require(x.shape[1] == rank + QK_DIM and x.stride(1) == 1, f"x must be [T, {rank + QK_DIM}] with unit column stride")
    require(kv_weight.shape == (LATENT_DIM,), f"the key's norm must have {LATENT_DIM} weights")
    require(q_weight.is_contiguous() and kv_weight.is_contiguous(), "weights must be contiguous")
    require(cos_sin.shape[1] == ROPE_DIM and cos_sin.is_contiguous(), f"cos_sin must be [P, {ROPE_DIM}]")
    require(positions.shape[0] == tokens >= slots.shape[0], "every token needs a position, and no other a slot")
    packed, scales, ropes = cache_views(cache)
    out = x.new_empty((tokens, rank))
    hidden, weight, product = beside or (x, x, x)
    outputs, width = (weight.shape[0], hidden.shape[1]) if beside else (0, 1)
    if beside:
        check_rows(hidden, weight, BESIDE_TOKENS)
        require(product.shape == (tokens, outputs) and product.is_contiguous(), f"a product must be [{tokens}, N]")
    if tokens == 0:
        return out
    tile = row_tile(width, _WARPS)
    latent_input_kernel[(tokens, 2 + triton.cdiv(outputs, 2 * tokens))](
        x,
        q_weight,
        kv_weight,
        positions,
        cos_sin,
        slots,
        out,
        cache,
        scales,
        ropes,
        hidden,
        weight,
        product,
        eps,
        slots.shape[0],
        outputs,
        x.stride(0) if tokens > 1 else x.shape[1],  # one row has any; kernels are compiled for those of a matrix
        cache.stride(0),
        RANK=rank,
        BR=triton.next_power_of_2(rank),
        BLOCK=cache.shape[1],
        PACKED=packed,
        K=width,
        BT=triton.next_power_of_2(tokens) if beside else 0,
        BW=tile[0],
        BC=tile[1],
        num_warps=_WARPS,
        **chained(x.device),
    )
    return out


def latent_input_reference(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in torch: normed query latents [T, R] and plain rows [T, 576], both of x's type."""
    q, latent, rope = x.split([q_weight.shape[0], LATENT_DIM, ROPE_DIM], dim=-1)
    rotated = rope_interleaved(rope, positions, cos_sin).to(x.dtype)
    return _rms_norm(q, q_weight, eps), torch.cat((_rms_norm(latent, kv_weight, eps), rotated), dim=-1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
