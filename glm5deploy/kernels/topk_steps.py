"""Top-k of rows that one program holds in registers, in Gluon: counted down the row's range.

A sample gives the range that the numbers are likely in. Every number becomes a step down that range, 2^23 of them, by
two instructions that never swap two numbers; a few rounds of counting then find the step of the k-th best. No key is
made of a number's bits, no range is tested in the first round, and every warp finds the bin by itself, without a
barrier. Where steps do not tell the k-th best from the next, or the range was wrong, the row is read again, and what is
left in question is counted by its bits: a poor sample costs time alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.kernels.topk_steps_device import (
    FIRST_STEP,
    LOG_STEPS,
    ends,
    find_bin,
    load_row,
    ones_before,
    ones_where_equal,
    places,
    sample,
    scan_fours,
    steps_down,
    store_each,
    store_fours,
)

MOST_KEY = gl.constexpr(2139095040)  # +inf's


@gluon.jit
def far_keys(b_x, before, width, o_c):
    """uint32 in the opposite order of the numbers, 0 for +inf; -0 counts as 0, NaN as -inf; 2^32 - 1 outside."""
    # The sum makes -0 a 0, and the maximum of NaN and a number is the number.
    b_bits = gl.maximum(b_x + 0.0, float("-inf")).to(gl.int32, bitcast=True)
    b_far = (MOST_KEY - (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF))).to(gl.uint32, bitcast=True)
    return gl.where((o_c >= before) & (o_c < before + width), b_far, 0xFFFFFFFF)


@gluon.jit(
    do_not_specialize=["k", "stride_in", "stride_topk"],
    do_not_specialize_on_alignment=["starts", "lengths", "topk"],
)
def topk_steps_kernel(
    logits,  # fp32 [T, stride_in], 16-byte aligned
    starts,  # int32 [T], first column of the row, read when HAS_STARTS
    lengths,  # int32 [T], columns of the row, at most 128 * WARPS * GROUPS - 3
    topk,  # int32 [T, stride_topk]
    k,
    stride_in,
    stride_topk,
    HAS_STARTS: gl.constexpr,
    WARPS: gl.constexpr,  # of this launch
    GROUPS: gl.constexpr,  # of 128 columns that a warp holds; a multiple of 4
    LOG_BINS: gl.constexpr,  # of one round; at least 5
    SPARING: gl.constexpr,  # fewer registers, for a few more instructions
):
    BINS: gl.constexpr = 2**LOG_BINS
    totals = gl.allocate_shared_memory(gl.int32, [WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i_t = gl.program_id(0).to(gl.int64)
    width = gl.load(lengths + i_t)
    o_row = i_t * stride_in
    if HAS_STARTS:
        o_row += gl.load(starts + i_t)
    before = (o_row % 4).to(gl.int32)
    p_row = logits + gl.multiple_of(o_row - before, 4)
    p_top = topk + i_t * stride_topk
    b_x, o_c = load_row(p_row, before, width, WARPS, GROUPS)
    gl.barrier()  # or the sample is waited for before the last columns are asked for
    b_sample = sample(p_row, before, width, WARPS)
    if (before > 0) | (width % 4 != 0):
        b_x = gl.where((o_c >= before) & (o_c < before + width), b_x, float("nan"))
    low = gl.min(gl.min(b_sample, axis=1), axis=0)
    high = gl.max(gl.max(b_sample, axis=1), axis=0)
    margin = (high - low) * 0.125
    factor = 1.0 / ((high + margin) - (low - margin))
    offset = (margin - low) * factor
    b_u = steps_down(b_x, factor, offset)

    SHIFT: gl.constexpr = LOG_STEPS - LOG_BINS
    b_bin = (b_u >> SHIFT) & (BINS - 1)
    bin, above, reach = find_bin(b_bin.to(gl.int32), b_bin < BINS, 0, k, WARPS, LOG_BINS)
    shift = gl.to_tensor(SHIFT)
    first = FIRST_STEP + (bin << SHIFT)
    if width <= k:
        reach = k + 1  # columns outside of the row were counted
    held = -1
    # The first and the last bin hold all that lies beyond the range as well.
    sure = (bin > 0) & (bin < BINS - 1) & (width > k)
    # Two numbers may be near each other; more that stay together from one round to the next are likely to be equal.
    while sure & (reach != k) & (shift > 0) & ((reach - above != held) | (held <= 2)):
        held = reach - above
        shift = gl.maximum(shift - LOG_BINS, 0)
        b_bin = (b_u - first.to(gl.uint32)) >> shift.to(gl.uint32)
        bin, above, reach = find_bin(b_bin.to(gl.int32), b_bin < BINS, above, k, WARPS, LOG_BINS)
        first += bin << shift
    last = (first + (1 << shift) - 1).to(gl.uint32)
    if reach != k:
        # Read anew, so that nothing is kept for this case in the other one.
        size = gl.load(lengths + i_t, volatile=True)
        b_y, o_d = load_row(p_row, before, size, WARPS, GROUPS)
        b_u = far_keys(b_y, before, size, o_d)
        if size > k:
            # What no step told from the k-th best lies together in the order of keys, too.
            b_step = steps_down(b_y, factor, offset)
            m_left = (b_step >= first.to(gl.uint32)) & (b_step <= last) & (b_u != 0xFFFFFFFF)
            base, top = ends(b_u, m_left)
            span = top - base
            while (reach != k) & (span > 0):
                # Bits of span minus those of a bin's number; rounding up to a power of two costs half of the bins.
                bits = (span.to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 126
                by = gl.maximum(bits - LOG_BINS, 0).to(gl.uint32)
                b_far = b_u - base  # those before base wrap around, beyond span
                bin, above, reach = find_bin((b_far >> by).to(gl.int32), b_far <= span, above, k, WARPS, LOG_BINS)
                begin = bin.to(gl.uint32) << by
                base += begin
                span = gl.minimum(span - begin, (gl.to_tensor(1).to(gl.uint32) << by) - 1)
            last = base + span
            if reach != k:
                # All that are left equal the k-th best: the first ones are taken.
                b_same = ones_where_equal(b_u, last)
                b_rank = ones_before(b_same, totals, WARPS, GROUPS) + scan_fours(b_same)
                b_u = gl.where((b_u == last) & (b_rank > k - above), 0xFFFFFFFF, b_u)
        else:
            last = gl.to_tensor(0xFFFFFFFE).to(gl.uint32)
            gl.store(p_top + o_d, -1, mask=(o_d >= size) & (o_d < k))
        b_u = (b_u > last).to(gl.uint32)
        last = gl.to_tensor(0).to(gl.uint32)

    # Negative where the column is taken: the sign is the flag, and neither predicates nor flags are kept. Numbers are
    # below 2^31 here.
    b_less = (b_u - (last + 1)).to(gl.int32, bitcast=True)
    b_flag = (b_less.to(gl.uint32, bitcast=True) >> 31).to(gl.int32)
    b_before = ones_before(b_flag, totals, WARPS, GROUPS)
    o_t, o_r = places(WARPS, GROUPS)
    if SPARING:
        store_fours(p_top, b_before, (o_t - before) + o_r, b_less)
    else:
        store_each(p_top - 1, b_before + scan_fours(b_flag), (o_t - before) + o_r, b_less)
