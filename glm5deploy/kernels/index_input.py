"""What precedes index scores, in one launch: queries prepared, keys normed, rotated, quantised and stored.

Numbers are rounded where the three launches of :mod:`glm5deploy.kernels.index_cache` that it stands for round them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, let_next_begin, wait_for_previous
from glm5deploy.kernels.fp8 import f32_to_e4m3, power_of_two_scale
from glm5deploy.kernels.index_cache import prepare_keys, prepare_query
from glm5deploy.kernels.index_checks import check_cache, check_key, check_query
from glm5deploy.kernels.latent_cache import byte_view, token_stride
from glm5deploy.kernels.layout import require

_KEY_TOKENS = 4


@triton.jit
def store_keys(b_even, b_odd, b_rest, values, scales, b_slot, m_t, stride_block, BLOCK: tl.constexpr):
    """Quantise keys [BT, 32 even, 32 odd and 64 dimensions] and write them at b_slot; m_t masks tokens without one."""
    b_even, b_odd, b_rest = b_even.to(tl.float32), b_odd.to(tl.float32), b_rest.to(tl.float32)
    b_amax = tl.maximum(tl.max(tl.abs(b_even), axis=1), tl.max(tl.abs(b_odd), axis=1))
    b_scale, b_inverse = power_of_two_scale(tl.maximum(b_amax, tl.max(tl.abs(b_rest), axis=1)))  # [BT]
    b_slot = tl.where(m_t, b_slot, 0)
    o_base = b_slot // BLOCK * stride_block
    o_in = b_slot % BLOCK
    p_value = values + (o_base + o_in * 128)[:, None]
    p_even = p_value + 2 * tl.arange(0, 32)[None, :]
    tl.store(p_even, f32_to_e4m3(b_even * b_inverse[:, None]), mask=m_t[:, None])
    tl.store(p_even + 1, f32_to_e4m3(b_odd * b_inverse[:, None]), mask=m_t[:, None])
    tl.store(p_value + 64 + tl.arange(0, 64)[None, :], f32_to_e4m3(b_rest * b_inverse[:, None]), mask=m_t[:, None])
    tl.store(scales + o_base // 4 + BLOCK * 32 + o_in, b_scale, mask=m_t)


@triton.jit(
    do_not_specialize=["tokens", "stride_weights"],
    do_not_specialize_on_alignment=["positions", "slots", "weights", "weights_out"],
)
def index_input_kernel(
    q,  # [T, J, 128]
    weights,  # [T, J]
    k,  # [T, 128]
    norm_weight,  # [128]
    norm_bias,  # [128]
    positions,  # int [T]
    cos_sin,  # [P, 64]: 32 cosines, then 32 sines
    slots,  # int [T], block * block_size + offset; negative ones are skipped
    q_out,  # [T, J, 128]: uint8 (e4m3 codes) or a 16-bit float holding the same values
    weights_out,  # fp32 [T, J]
    values,  # key cache seen as uint8
    scales,  # key cache seen as fp32
    factor,
    eps,
    tokens,
    stride_q_t,
    stride_q_j,
    stride_weights,
    stride_k,
    stride_block,  # bytes between two blocks
    J: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (ceil(T / BT) + T): programs for BT keys each, then one for each token's queries."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    i_p = tl.program_id(0)
    key_programs = tl.cdiv(tokens, BT)
    if i_p < key_programs:
        o_t = i_p.to(tl.int64) * BT + tl.arange(0, BT)
        b_slot = tl.load(slots + o_t, mask=o_t < tokens, other=-1).to(tl.int64)
        b_even, b_odd, b_rest = prepare_keys(k, norm_weight, norm_bias, positions, cos_sin, eps, tokens, stride_k, o_t)
        store_keys(b_even, b_odd, b_rest, values, scales, b_slot, b_slot >= 0, stride_block, BLOCK)
    else:
        i_t = (i_p - key_programs).to(tl.int64)
        strides = stride_q_t, stride_q_j, stride_weights
        prepare_query(q, weights, positions, cos_sin, q_out, weights_out, factor, i_t, *strides, J, CODES)


def index_input(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    norm: tuple[torch.Tensor, torch.Tensor, float],
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    factor: float,
    slots: torch.Tensor,
    cache: torch.Tensor,
    values: torch.Tensor,
    weights_out: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.prepare_index_query`, and `prepare_index_key` and `store_index_keys` behind it, in one launch.

    q [T, J, 128], k [T, 128], weights [T, J], the key's LayerNorm ``norm`` (weight and bias [128], eps), positions and
    slots int [T], cos_sin [P, 64], cache uint8 [blocks, block_size, 132] -> values [T, J, 128] and weights_out fp32
    [T, J] as :func:`glm5deploy.kernels.indexer.prepare_index_query` gives them; a negative slot stores nothing.
    """
    weight, bias, eps = norm
    codes = check_query(q, weights, cos_sin, values, weights_out)
    check_key(k, weight, bias, cos_sin)
    check_cache(cache)
    tokens, heads, _ = q.shape
    require(k.shape[0] == slots.shape[0] == positions.shape[0] == tokens, "every token needs a key, a slot, a position")
    if tokens == 0:
        return values, weights_out
    index_input_kernel[(triton.cdiv(tokens, _KEY_TOKENS) + tokens,)](
        q,
        weights,
        k,
        weight,
        bias,
        positions,
        cos_sin,
        slots,
        values.view(torch.uint8) if codes else values,
        weights_out,
        cache,
        byte_view(cache, torch.float32),
        factor,
        eps,
        tokens,
        token_stride(q),
        q.stride(1),
        weights.stride(0),
        token_stride(k),
        cache.stride(0),
        J=heads,
        CODES=codes,
        BLOCK=cache.shape[1],
        BT=_KEY_TOKENS,
        num_warps=4,
        **chained(q.device),
    )
    return values, weights_out
