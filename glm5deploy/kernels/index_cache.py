"""Preparation of index queries and keys, and the key cache: quantise, store, gather. Layout: `layout.py`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.fp8 import e4m3_to_f32, f32_to_e4m3, power_of_two_scale
from glm5deploy.kernels.rope import rotate_pairs


@triton.jit
def prepare_query(
    q, weights, positions, cos_sin, q_out, weights_out, factor, i_t, stride_q_t, stride_q_j, stride_weights,
    J: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """One token's index queries: RoPE, quantisation, and their scales in the head weights."""
    o_j = tl.arange(0, J)
    o_half = tl.arange(0, 32)
    o_rest = tl.arange(0, 64)
    i_position = tl.load(positions + i_t).to(tl.int64)
    # The queries come in while the angles' loads wait for the position.
    p_q = q + i_t * stride_q_t + o_j[:, None] * stride_q_j
    b_even = tl.load(p_q + 2 * o_half[None, :]).to(tl.float32)  # [J, 32]
    b_odd = tl.load(p_q + 2 * o_half[None, :] + 1).to(tl.float32)
    b_rest = tl.load(p_q + 64 + o_rest[None, :]).to(tl.float32)  # [J, 64]
    b_w = tl.load(weights + i_t * stride_weights + o_j).to(tl.float32)
    p_angle = cos_sin + i_position * 64
    b_cos = tl.load(p_angle + o_half).to(tl.float32)
    b_sin = tl.load(p_angle + 32 + o_half).to(tl.float32)
    b_even, b_odd = rotate_pairs(b_even, b_odd, b_cos[None, :], b_sin[None, :])
    # Rounded to q's type, as the model does when RoPE is an operation of its own.
    b_even = b_even.to(q.dtype.element_ty).to(tl.float32)
    b_odd = b_odd.to(q.dtype.element_ty).to(tl.float32)
    b_amax = tl.maximum(tl.max(tl.abs(b_even), axis=1), tl.max(tl.abs(b_odd), axis=1))
    b_amax = tl.maximum(b_amax, tl.max(tl.abs(b_rest), axis=1))
    b_scale, b_inverse = power_of_two_scale(b_amax)  # [J]
    b_even = f32_to_e4m3(b_even * b_inverse[:, None])
    b_odd = f32_to_e4m3(b_odd * b_inverse[:, None])
    b_rest = f32_to_e4m3(b_rest * b_inverse[:, None])
    p_out = q_out + (i_t * J + o_j[:, None]) * 128
    if CODES:
        tl.store(p_out + 2 * o_half[None, :], b_even)
        tl.store(p_out + 2 * o_half[None, :] + 1, b_odd)
        tl.store(p_out + 64 + o_rest[None, :], b_rest)
    else:
        tl.store(p_out + 2 * o_half[None, :], e4m3_to_f32(b_even).to(q_out.dtype.element_ty))
        tl.store(p_out + 2 * o_half[None, :] + 1, e4m3_to_f32(b_odd).to(q_out.dtype.element_ty))
        tl.store(p_out + 64 + o_rest[None, :], e4m3_to_f32(b_rest).to(q_out.dtype.element_ty))
    tl.store(weights_out + i_t * J + o_j, b_w * b_scale * factor)


@triton.jit
def prepare_keys(k, weight, bias, positions, cos_sin, eps, tokens, stride_k, o_t):
    """LayerNorm and RoPE of the index keys o_t, [BT, 32] of even dimensions, of odd ones and [BT, 64], in k's type."""
    m_t = (o_t < tokens)[:, None]
    o_even = 2 * tl.arange(0, 32)
    o_rest = 64 + tl.arange(0, 64)
    i_position = tl.load(positions + o_t, mask=o_t < tokens, other=0).to(tl.int64)
    # All that waits for nothing comes before what waits for the position.
    p_k = k + o_t[:, None] * stride_k
    b_even = tl.load(p_k + o_even[None, :], mask=m_t, other=0.0).to(tl.float32)
    b_odd = tl.load(p_k + o_even[None, :] + 1, mask=m_t, other=0.0).to(tl.float32)
    b_rest = tl.load(p_k + o_rest[None, :], mask=m_t, other=0.0).to(tl.float32)
    b_weight_even, b_bias_even = tl.load(weight + o_even)[None, :], tl.load(bias + o_even)[None, :]
    b_weight_odd, b_bias_odd = tl.load(weight + o_even + 1)[None, :], tl.load(bias + o_even + 1)[None, :]
    b_weight_rest, b_bias_rest = tl.load(weight + o_rest)[None, :], tl.load(bias + o_rest)[None, :]
    p_angle = cos_sin + i_position[:, None] * 64 + tl.arange(0, 32)[None, :]
    b_cos = tl.load(p_angle, mask=m_t, other=0.0).to(tl.float32)
    b_sin = tl.load(p_angle + 32, mask=m_t, other=0.0).to(tl.float32)
    b_mean = (tl.sum(b_even, axis=1) + tl.sum(b_odd, axis=1) + tl.sum(b_rest, axis=1)) / 128
    b_even -= b_mean[:, None]
    b_odd -= b_mean[:, None]
    b_rest -= b_mean[:, None]
    b_squares = tl.sum(b_even * b_even, axis=1) + tl.sum(b_odd * b_odd, axis=1) + tl.sum(b_rest * b_rest, axis=1)
    b_factor = (1.0 / tl.sqrt(b_squares / 128 + eps))[:, None]
    # Rounded to k's type after the norm and after RoPE, as the model does with each an operation of its own.
    DTYPE: tl.constexpr = k.dtype.element_ty
    b_even = (b_even * b_factor * b_weight_even + b_bias_even).to(DTYPE).to(tl.float32)
    b_odd = (b_odd * b_factor * b_weight_odd + b_bias_odd).to(DTYPE).to(tl.float32)
    b_rest = b_rest * b_factor * b_weight_rest + b_bias_rest
    b_even, b_odd = rotate_pairs(b_even, b_odd, b_cos, b_sin)
    return b_even.to(DTYPE), b_odd.to(DTYPE), b_rest.to(DTYPE)


@triton.jit(
    do_not_specialize=["stride_weights"], do_not_specialize_on_alignment=["positions", "weights", "weights_out"]
)
def prepare_query_kernel(
    q,  # [T, J, 128]
    weights,  # [T, J]
    positions,  # int [T]
    cos_sin,  # [P, 64]: 32 cosines, then 32 sines
    q_out,  # [T, J, 128]: uint8 (e4m3 codes) or a 16-bit float holding the same values
    weights_out,  # fp32 [T, J]
    factor,
    stride_q_t,
    stride_q_j,
    stride_weights,
    J: tl.constexpr,
    CODES: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    strides = stride_q_t, stride_q_j, stride_weights
    prepare_query(q, weights, positions, cos_sin, q_out, weights_out, factor, i_t, *strides, J, CODES)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions"])
def prepare_key_kernel(
    k,  # [T, 128]
    weight,  # [128]
    bias,  # [128]
    positions,  # int [T]
    cos_sin,  # [P, 64]: 32 cosines, then 32 sines
    k_out,  # [T, 128], k's type
    eps,
    tokens,
    stride_k,
    BT: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b_even, b_odd, b_rest = prepare_keys(k, weight, bias, positions, cos_sin, eps, tokens, stride_k, o_t)
    m_t = (o_t < tokens)[:, None]
    p_out = k_out + o_t[:, None] * 128
    p_even = p_out + 2 * tl.arange(0, 32)[None, :]
    tl.store(p_even, b_even, mask=m_t)
    tl.store(p_even + 1, b_odd, mask=m_t)
    tl.store(p_out + 64 + tl.arange(0, 64)[None, :], b_rest, mask=m_t)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def store_keys_kernel(
    k,  # [T, 128]
    slots,  # int [T], block * block_size + offset; negative ones are skipped
    values,  # key cache seen as uint8
    scales,  # key cache seen as fp32
    tokens,
    stride_k,
    stride_block,  # bytes between two blocks
    BLOCK: tl.constexpr,
    BT: tl.constexpr,
):
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)
    o_d = tl.arange(0, 128)
    b_slot = tl.load(slots + o_t, mask=o_t < tokens, other=-1).to(tl.int64)
    m_t = b_slot >= 0
    b_slot = tl.where(m_t, b_slot, 0)
    b_k = tl.load(k + o_t[:, None].to(tl.int64) * stride_k + o_d[None, :], mask=m_t[:, None], other=0.0).to(tl.float32)
    b_scale, b_inverse = power_of_two_scale(tl.max(tl.abs(b_k), axis=1))
    o_base = b_slot // BLOCK * stride_block
    o_in = b_slot % BLOCK
    p_value = values + (o_base + o_in * 128)[:, None] + o_d[None, :]
    tl.store(p_value, f32_to_e4m3(b_k * b_inverse[:, None]), mask=m_t[:, None])
    tl.store(scales + o_base // 4 + BLOCK * 32 + o_in, b_scale, mask=m_t)


@triton.jit(
    do_not_specialize=["keys", "requests", "steps", "stride_table"],
    do_not_specialize_on_alignment=["cumulative", "block_table"],
)
def gather_keys_kernel(
    values,  # key cache seen as uint8
    scales,  # key cache seen as fp32
    block_table,  # int32 [R, stride_table]
    cumulative,  # int32 [R + 1]: request r owns output rows cumulative[r] .. cumulative[r + 1] - 1
    k_out,  # [S, 128]: uint8 (e4m3 codes) or a 16-bit float (dequantised)
    scale_out,  # fp32 [S], written when CODES
    keys,  # S
    requests,  # R
    steps,  # bit length of R
    stride_table,
    stride_block,
    BLOCK: tl.constexpr,
    BS: tl.constexpr,
    CODES: tl.constexpr,
):
    o_s = tl.program_id(0) * BS + tl.arange(0, BS)
    o_d = tl.arange(0, 128)
    m_s = o_s < keys
    b_low = tl.zeros([BS], tl.int32)
    b_high = b_low + requests - 1
    # Last request that starts at or before the row: empty requests share a start and must lose.
    for _ in range(steps):
        b_middle = (b_low + b_high + 1) // 2
        m_right = tl.load(cumulative + b_middle, mask=m_s, other=0) <= o_s
        b_low = tl.where(m_right, b_middle, b_low)
        b_high = tl.where(m_right, b_high, b_middle - 1)
    b_position = o_s - tl.load(cumulative + b_low, mask=m_s, other=0)
    p_table = block_table + b_low.to(tl.int64) * stride_table + b_position // BLOCK
    o_base = tl.load(p_table, mask=m_s, other=0).to(tl.int64) * stride_block
    o_in = b_position % BLOCK
    b_code = tl.load(values + (o_base + o_in * 128)[:, None] + o_d[None, :], mask=m_s[:, None], other=0)
    b_scale = tl.load(scales + o_base // 4 + BLOCK * 32 + o_in, mask=m_s, other=0.0)
    p_out = k_out + o_s[:, None].to(tl.int64) * 128 + o_d[None, :]
    if CODES:
        tl.store(p_out, b_code, mask=m_s[:, None])
        tl.store(scale_out + o_s, b_scale, mask=m_s)
    else:
        b_k = e4m3_to_f32(b_code) * b_scale[:, None]
        tl.store(p_out, b_k.to(k_out.dtype.element_ty), mask=m_s[:, None])
