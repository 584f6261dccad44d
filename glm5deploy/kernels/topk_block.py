"""Top-k of rows that one program holds in registers."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.topk_device import (
    LEAST_KEY,
    MOST_KEY,
    NO_KEY,
    columns,
    exclusive_count,
    ordered_key,
    row_begin,
    scatter,
    select_keys,
)


@triton.jit(
    do_not_specialize=["k", "stride_in", "stride_topk"],
    do_not_specialize_on_alignment=["starts", "lengths", "topk"],
)
def topk_block_kernel(
    logits,  # fp32 [T, stride_in], 16-byte aligned
    starts,  # int32 [T], first column of the row, read when HAS_STARTS
    lengths,  # int32 [T], columns of the row, at most 512 * WARPS - 3
    topk,  # int32 [T, stride_topk]
    k,
    stride_in,
    stride_topk,
    HAS_STARTS: tl.constexpr,
    WARPS: tl.constexpr,  # of this launch
    ASM: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    width, o_row, before = row_begin(starts, lengths, i_t, stride_in, HAS_STARTS)
    o_c = columns(WARPS)
    end = tl.multiple_of((before + width + 3) // 4 * 4, 4)
    b_key = ordered_key(tl.load(logits + o_row + o_c, mask=o_c < end, other=0.0))
    o_c -= before
    b_key = tl.where((o_c >= 0) & (o_c < width), b_key, NO_KEY)
    high, least = tl.full((), MOST_KEY, tl.int32), tl.full((), LEAST_KEY, tl.int32)
    b_key, low = select_keys(b_key, width, high, least, k, WARPS, LOG_BINS=9)
    o_out, _count = exclusive_count((b_key > low).to(tl.int32), WARPS)
    p_top = topk + i_t * stride_topk
    scatter(p_top, o_out, o_c, b_key, low, ASM)
    if width < k:
        o_c += before
        tl.store(p_top + o_c, -1, mask=(o_c >= width) & (o_c < k))
