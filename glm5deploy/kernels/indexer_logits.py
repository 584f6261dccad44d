"""Lightning-indexer scores: logits[t, s] = scale[s] * sum over heads of w[t, j] * relu(q[t, j] . k[s]).

Keys are the rows of the matrix product and (query, head) pairs its columns: the sum over heads then stays inside a
thread and its three neighbours. See README.md for the arithmetic.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import wait_for_previous
from glm5deploy.kernels.fp8 import e4m3_to_f32


@triton.jit
def _weighted_scores(b_k, b_qt, b_w, BS: tl.constexpr, BQ: tl.constexpr, J: tl.constexpr):
    """b_k [BS, 128], b_qt [128, BQ * J], b_w [BQ * J] -> [BS, BQ] fp32."""
    b_s = tl.maximum(tl.dot(b_k, b_qt), 0.0) * b_w[None, :]
    return tl.sum(tl.reshape(b_s, [BS, BQ, J]), axis=2)


@triton.jit(
    do_not_specialize=["tokens", "stride_logits"],
    do_not_specialize_on_alignment=["starts", "ends", "weights", "k_scale", "logits"],
)
def ragged_logits_kernel(
    q,  # [T, J, 128], float8e4nv or a 16-bit float holding e4m3 values
    k,  # [S, 128], the same type as q
    k_scale,  # fp32 [S], read when HAS_SCALE
    weights,  # fp32 [T, J], the query's scale folded in
    starts,  # int32 [T]: row t scores keys starts[t] .. ends[t] - 1
    ends,  # int32 [T]
    logits,  # fp32 [T, stride_logits], column s - starts[t]
    tokens,
    stride_logits,
    J: tl.constexpr,
    BQ: tl.constexpr,
    BS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    i_q = tl.program_id(0)
    o_q = i_q * BQ + tl.arange(0, BQ)
    o_c = tl.arange(0, BQ * J)
    o_d = tl.arange(0, 128)
    o_s = tl.arange(0, BS)
    m_q = o_q < tokens
    o_row = i_q.to(tl.int64) * (BQ * J) + o_c  # row of q seen as [T * J, 128]
    m_row = i_q * BQ + o_c // J < tokens
    b_start = tl.load(starts + o_q, mask=m_q, other=2147483647)
    b_end = tl.load(ends + o_q, mask=m_q, other=0)
    # A query without keys must not widen the range of its neighbours.
    m_q = m_q & (b_end > b_start)
    begin = tl.min(tl.where(m_q, b_start, 2147483647), axis=0)
    end = tl.max(tl.where(m_q, b_end, 0), axis=0)
    # Where no query of the block has keys, begin is still int32's maximum, and adding to it would wrap around.
    begin = tl.minimum(begin, end)

    b_q = tl.load(q + o_row[:, None] * 128 + o_d[None, :], mask=m_row[:, None], other=0.0)
    b_qt = tl.trans(b_q)  # [128, BQ * J]
    b_w = tl.load(weights + o_row, mask=m_row, other=0.0)
    p_out = logits + o_q.to(tl.int64) * stride_logits  # [BQ]
    step = tl.num_programs(1) * BS
    for i_s in range(begin + tl.program_id(1) * BS, end, step):
        o_key = i_s + o_s
        m_key = o_key < end
        o_key64 = o_key.to(tl.int64)
        b_k = tl.load(k + o_key64[:, None] * 128 + o_d[None, :], mask=m_key[:, None], other=0.0)
        b_out = _weighted_scores(b_k, b_qt, b_w, BS, BQ, J)
        if HAS_SCALE:
            b_out = b_out * tl.load(k_scale + o_key64, mask=m_key, other=0.0)[:, None]
        m_out = m_q[None, :] & (o_key[:, None] >= b_start[None, :]) & (o_key[:, None] < b_end[None, :])
        tl.store(p_out[None, :] + (o_key[:, None] - b_start[None, :]), b_out, mask=m_out)


@triton.jit(
    do_not_specialize=["next_n", "stride_table", "stride_logits"],
    do_not_specialize_on_alignment=["lengths", "block_table", "weights", "logits"],
)
def paged_logits_kernel(
    q,  # [B * next_n, J, 128], float8e4nv or a 16-bit float holding e4m3 values
    values,  # key cache seen as float8e4nv (KEYS_FP8) or uint8
    scales,  # key cache seen as fp32
    weights,  # fp32 [B * next_n, J]
    lengths,  # int32 [B * next_n]: row r scores positions 0 .. lengths[r] - 1 of its request
    block_table,  # int32 [B, stride_table]
    logits,  # fp32 [B * next_n, stride_logits]
    next_n,
    stride_table,
    stride_block,  # bytes between two blocks of the cache
    stride_logits,
    J: tl.constexpr,
    NQ: tl.constexpr,  # at least next_n
    BS: tl.constexpr,
    BLOCK: tl.constexpr,  # tokens of a cache block
    KEYS_FP8: tl.constexpr,
    CHAINED: tl.constexpr,
):
    i_b = tl.program_id(0)
    o_n = tl.arange(0, NQ)
    o_c = tl.arange(0, NQ * J)
    o_d = tl.arange(0, 128)
    o_s = tl.arange(0, BS)
    m_n = o_n < next_n
    o_row = (i_b * next_n).to(tl.int64) * J + o_c
    m_row = o_c // J < next_n
    wait_for_previous(CHAINED)
    b_length = tl.load(lengths + i_b * next_n + o_n, mask=m_n, other=0)  # [NQ]
    end = tl.max(b_length, axis=0)

    b_q = tl.load(q + o_row[:, None] * 128 + o_d[None, :], mask=m_row[:, None], other=0.0)
    b_qt = tl.trans(b_q)
    b_w = tl.load(weights + o_row, mask=m_row, other=0.0)
    p_out = logits + (i_b * next_n + o_n).to(tl.int64) * stride_logits  # [NQ]
    p_table = block_table + i_b.to(tl.int64) * stride_table
    step = tl.num_programs(1) * BS
    begin = tl.program_id(1) * BS
    b_block = tl.load(p_table + (begin + o_s) // BLOCK, mask=begin + o_s < end, other=0)  # [BS]
    for i_s in range(begin, end, step):
        o_key = i_s + o_s
        m_key = o_key < end
        o_base = b_block.to(tl.int64) * stride_block
        o_in = o_key % BLOCK
        b_k = tl.load(values + (o_base + o_in * 128)[:, None] + o_d[None, :], mask=m_key[:, None], other=0.0)
        b_scale = tl.load(scales + o_base // 4 + (BLOCK * 32 + o_in), mask=m_key, other=0.0)
        # The next tile's blocks come in during this tile's product.
        o_next = i_s + step + o_s
        b_block = tl.load(p_table + o_next // BLOCK, mask=o_next < end, other=0)
        if not KEYS_FP8:
            b_k = e4m3_to_f32(b_k).to(q.dtype.element_ty)
        b_out = _weighted_scores(b_k, b_qt, b_w, BS, NQ, J) * b_scale[:, None]
        m_out = m_n[None, :] & (o_key[:, None] < b_length[None, :])
        tl.store(p_out[None, :] + o_key[:, None], b_out, mask=m_out)
