"""Sparse MLA forward: one program per (token, block of heads, split of its selected positions).

The 512 latent dimensions of a row are key and value at once: a tile of BK rows is loaded once, multiplied with the
queries transposed for the scores and as it stands for the output. It comes in four pieces of 128 dimensions: a thread
then copies from few rows, so it holds few addresses (and 128 is the group of the packed cache's scales). Derivation
and tile arithmetic: README.md.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.kernels.fp8 import e4m3_to_bf16, e4m3_to_f32


@triton.jit
def load_latent(rows, b_row, m_row, I_C: tl.constexpr, KV_FP8: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Dimensions 128 * I_C to 128 * I_C + 127 of the latent rows b_row, [BK, 128]; masked rows are zero.

    Plain rows have 576 elements. Packed ones, 656 bytes, are seen as uint8 and come without their scale: e4m3 is exact
    in 16 bits, and the scale is applied to the scores and the weights instead, which are far fewer.
    """
    o_d = I_C * 128 + tl.arange(0, 128)
    if KV_FP8:
        b_byte = tl.load(rows + b_row[:, None] * 656 + o_d[None, :], mask=m_row[:, None], other=0)
        b_kv = e4m3_to_bf16(b_byte) if ASM else e4m3_to_f32(b_byte)
    else:
        b_kv = tl.load(rows + b_row[:, None] * 576 + o_d[None, :], mask=m_row[:, None], other=0.0)
    return b_kv.to(DTYPE)


@triton.jit
def load_rope(rows, ropes, b_row, m_row, KV_FP8: tl.constexpr, DTYPE: tl.constexpr):
    """The 64 RoPE dimensions of the rows b_row, [BK, 64]; packed rows are seen as bf16 by `ropes`."""
    o_r = tl.arange(0, 64)
    if KV_FP8:
        p_rope = ropes + b_row[:, None] * 328 + 264 + o_r[None, :]
    else:
        p_rope = rows + b_row[:, None] * 576 + 512 + o_r[None, :]
    return tl.load(p_rope, mask=m_row[:, None], other=0.0).to(DTYPE)


@triton.jit(
    do_not_specialize=["keys", "keys_per_split", "stride_slots"], do_not_specialize_on_alignment=["slots", "counts"]
)
def sparse_mla_fwd_kernel(
    q_nope,  # [T, H, 512]
    q_rope,  # [T, H, 64]
    rows,  # [N, 576], or packed uint8 [N, 656]
    scales,  # packed rows as fp32 [N, 164]
    ropes,  # packed rows as bf16 [N, 328]
    slots,  # int32 [T, K], -1 for none
    counts,  # int32 [T]: only the first counts[t] entries of slots[t] are looked at
    out,  # [T, H, 512], or fp32 [T, H, splits, 512] when SPLIT
    lse,  # fp32 [T, H], or [T, H, splits] when SPLIT
    scale_log2,  # softmax scale * log2(e)
    keys,  # K
    keys_per_split,  # a multiple of BK
    stride_nope_t,
    stride_nope_h,
    stride_rope_t,
    stride_rope_h,
    stride_slots,
    H: tl.constexpr,
    BH: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    KV_FP8: tl.constexpr,
    ASM: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    i_h = tl.program_id(0)
    i_t = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    o_h = i_h * BH + tl.arange(0, BH)
    o_d = tl.arange(0, 128)
    o_r = tl.arange(0, 64)
    o_k = tl.arange(0, BK)
    m_h = o_h < H
    DTYPE: tl.constexpr = q_nope.dtype.element_ty

    begin = i_s * keys_per_split
    end = tl.minimum(keys, begin + keys_per_split)
    p_slot = slots + i_t * stride_slots + o_k
    wait_for_previous(CHAINED)
    # Loaded before the count is known, so that the two latencies overlap.
    b_slot = tl.load(p_slot + begin, mask=begin + o_k < end, other=-1)  # [BK]
    if HAS_COUNTS:
        end = tl.minimum(end, tl.load(counts + i_t))
        b_slot = tl.where(begin + o_k < end, b_slot, -1)

    p_q = q_nope + i_t * stride_nope_t + o_h[:, None] * stride_nope_h + o_d[None, :]
    b_q0 = tl.load(p_q, mask=m_h[:, None], other=0.0)  # [BH, 128]
    b_q1 = tl.load(p_q + 128, mask=m_h[:, None], other=0.0)
    b_q2 = tl.load(p_q + 256, mask=m_h[:, None], other=0.0)
    b_q3 = tl.load(p_q + 384, mask=m_h[:, None], other=0.0)
    p_qr = q_rope + i_t * stride_rope_t + o_h[:, None] * stride_rope_h + o_r[None, :]
    b_qr = tl.load(p_qr, mask=m_h[:, None], other=0.0)  # [BH, 64]

    # Finite stand-ins for -inf: a masked score lies so far below the smallest running maximum that its weight is 0.
    b_m = tl.full([BH], -1.0e30, tl.float32)
    b_l = tl.zeros([BH], tl.float32)
    b_o0 = tl.zeros([BH, 128], tl.float32)
    b_o1 = tl.zeros([BH, 128], tl.float32)
    b_o2 = tl.zeros([BH, 128], tl.float32)
    b_o3 = tl.zeros([BH, 128], tl.float32)

    for i_k in range(begin, end, BK):
        m_slot = b_slot >= 0
        b_row = tl.where(m_slot, b_slot, 0).to(tl.int64)
        b_kv0 = load_latent(rows, b_row, m_slot, 0, KV_FP8, DTYPE, ASM)
        b_kv1 = load_latent(rows, b_row, m_slot, 1, KV_FP8, DTYPE, ASM)
        b_kv2 = load_latent(rows, b_row, m_slot, 2, KV_FP8, DTYPE, ASM)
        b_kv3 = load_latent(rows, b_row, m_slot, 3, KV_FP8, DTYPE, ASM)
        b_kr = load_rope(rows, ropes, b_row, m_slot, KV_FP8, DTYPE)
        # The next slots come in while this tile is multiplied: their latency would otherwise precede every gather.
        b_slot = tl.load(p_slot + i_k + BK, mask=i_k + BK + o_k < end, other=-1)

        # Several chains of products: one would be as long as the latency of its 36 steps.
        b_s = tl.dot(b_q0, tl.trans(b_kv0))  # [BH, BK]
        b_s1 = tl.dot(b_q1, tl.trans(b_kv1))
        if KV_FP8:
            p_scale = scales + b_row * 164 + 128
            b_c0 = tl.load(p_scale, mask=m_slot, other=0.0)[None, :]  # [1, BK]
            b_c1 = tl.load(p_scale + 1, mask=m_slot, other=0.0)[None, :]
            b_c2 = tl.load(p_scale + 2, mask=m_slot, other=0.0)[None, :]
            b_c3 = tl.load(p_scale + 3, mask=m_slot, other=0.0)[None, :]
            b_s2 = tl.dot(b_q2, tl.trans(b_kv2))
            b_s3 = tl.dot(b_q3, tl.trans(b_kv3))
            b_s = b_s * b_c0 + b_s1 * b_c1 + b_s2 * b_c2 + b_s3 * b_c3 + tl.dot(b_qr, tl.trans(b_kr))
        else:
            b_s = tl.dot(b_q2, tl.trans(b_kv2), b_s)
            b_s1 = tl.dot(b_q3, tl.trans(b_kv3), b_s1)
            b_s = tl.dot(b_qr, tl.trans(b_kr), b_s) + b_s1
        b_s = tl.where(m_slot[None, :], b_s * scale_log2, -2.0e30)
        b_m_new = tl.maximum(b_m, tl.max(b_s, axis=1))
        b_shrink = tl.exp2(b_m - b_m_new)
        b_p = tl.exp2(b_s - b_m_new[:, None])
        b_l = b_l * b_shrink + tl.sum(b_p, axis=1)
        if KV_FP8:
            b_w0, b_w1 = (b_p * b_c0).to(DTYPE), (b_p * b_c1).to(DTYPE)
            b_w2, b_w3 = (b_p * b_c2).to(DTYPE), (b_p * b_c3).to(DTYPE)
        else:
            b_w0 = b_p.to(DTYPE)
            b_w1, b_w2, b_w3 = b_w0, b_w0, b_w0
        b_o0 = tl.dot(b_w0, b_kv0, b_o0 * b_shrink[:, None])
        b_o1 = tl.dot(b_w1, b_kv1, b_o1 * b_shrink[:, None])
        b_o2 = tl.dot(b_w2, b_kv2, b_o2 * b_shrink[:, None])
        b_o3 = tl.dot(b_w3, b_kv3, b_o3 * b_shrink[:, None])
        b_m = b_m_new

    m_some = b_l > 0
    b_inverse = 1.0 / tl.where(m_some, b_l, 1.0)[:, None]
    b_lse = tl.where(m_some, (b_m + tl.log2(b_l)) * 0.6931471805599453, float("-inf"))
    o_out = i_t * H + o_h
    if SPLIT:
        o_out = o_out * tl.num_programs(2) + i_s
    tl.store(lse + o_out, b_lse, mask=m_h)
    p_out = out + o_out[:, None] * 512 + o_d[None, :]
    tl.store(p_out, (b_o0 * b_inverse).to(out.dtype.element_ty), mask=m_h[:, None])
    tl.store(p_out + 128, (b_o1 * b_inverse).to(out.dtype.element_ty), mask=m_h[:, None])
    tl.store(p_out + 256, (b_o2 * b_inverse).to(out.dtype.element_ty), mask=m_h[:, None])
    tl.store(p_out + 384, (b_o3 * b_inverse).to(out.dtype.element_ty), mask=m_h[:, None])


@triton.jit(do_not_specialize=["splits"])
def combine_splits_kernel(
    partial,  # fp32 [T * H, splits, 512]
    partial_lse,  # fp32 [T * H, splits]
    out,  # [T * H, 512]
    lse,  # fp32 [T * H]
    splits,
    BS: tl.constexpr,  # at least splits
    BD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Weighted mean of the splits' outputs, weights exp(lse of the split - lse of all)."""
    i_row = tl.program_id(0).to(tl.int64)
    o_d = tl.program_id(1) * BD + tl.arange(0, BD)
    o_s = tl.arange(0, BS)
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    b_lse = tl.load(partial_lse + i_row * splits + o_s, mask=o_s < splits, other=float("-inf"))  # [BS]
    m_s = b_lse > -1.0e30
    b_finite = tl.where(m_s, b_lse, -1.0e30)
    b_max = tl.max(b_finite, axis=0)
    b_weight = tl.where(m_s, tl.exp(b_finite - b_max), 0.0)
    b_sum = tl.sum(b_weight, axis=0)
    # Empty splits are not read at all: what lies there may be anything.
    b_part = tl.load(
        partial + (i_row * splits + o_s[:, None]) * 512 + o_d[None, :], mask=m_s[:, None], other=0.0
    )  # [BS, BD]
    b_out = tl.sum(b_part * b_weight[:, None], axis=0) / tl.where(b_sum > 0, b_sum, 1.0)
    tl.store(out + i_row * 512 + o_d, b_out.to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + i_row, tl.where(b_sum > 0, b_max + tl.log(b_sum), float("-inf")))
