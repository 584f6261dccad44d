"""Top-k of rows that one program holds in registers, in Gluon: counted down the row's range.

A sample gives the range that the numbers are likely in. Every number becomes a step down that range, 2^23 of them, by
two instructions that never swap two numbers; a few rounds of counting then find the step of the k-th best. No key is
made of a number's bits, no range is tested in the first round, and every warp finds the bin by itself, without a
barrier. Where steps do not tell the k-th best from the next, or the range was wrong, the row is read again, and what is
left in question is counted by its bits: a poor sample costs time alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.kernels.topk_device import mirrored
from glm5deploy.kernels.topk_steps_bins import (
    bin_from,
    count,
    count_between,
    count_in,
    ends,
    held_in,
    locate,
    nearest,
    zero_bins,
)
from glm5deploy.kernels.topk_steps_device import FIRST_STEP, LOG_STEPS, load_row, places, range_of, sample, steps_down
from glm5deploy.kernels.topk_steps_store import ones_before, ones_where_equal, scan_fours, store_each, store_fours

MOST_KEY = gl.constexpr(2139095040)  # +inf's
# Numbers left in question that each thread is asked for one of.
FEW = gl.constexpr(8)


@gluon.jit
def far_keys(row, before, width, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """uint32 in the opposite order of the numbers, 0 for +inf; -0 counts as 0, NaN as -inf; 2^32 - 1 outside."""
    found = ()
    for part in gl.static_range(len(row)):
        o_t, o_r = places(WARPS, GROUPS)[part]
        # The sum makes -0 a 0, and the maximum of NaN and a number is the number.
        b_bits = gl.maximum(row[part] + 0.0, float("-inf")).to(gl.int32, bitcast=True)
        b_far = (MOST_KEY - mirrored(b_bits)).to(gl.uint32, bitcast=True)
        m_in = (o_t + o_r >= before) & (o_t + o_r < before + width)
        found += (gl.where(m_in, b_far, 0xFFFFFFFF),)
    return found


@gluon.jit
def inside(row, before, width, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """NaN outside of the row."""
    found = ()
    for part in gl.static_range(len(row)):
        o_t, o_r = places(WARPS, GROUPS)[part]
        m_in = (o_t + o_r >= before) & (o_t + o_r < before + width)
        found += (gl.where(m_in, row[part], float("nan")),)
    return found


@gluon.jit(
    do_not_specialize=["k", "stride_in", "stride_topk", "columns"],
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
    columns,  # asked for before the row's length is known, which is no larger; 0: only those that the row has
    HAS_STARTS: gl.constexpr,
    WARPS: gl.constexpr,  # of this launch
    GROUPS: gl.constexpr,  # of 128 columns that a warp holds: 4, 6 or 8
    LOG_BINS: gl.constexpr,  # of one round; at least 5
    SPARING: gl.constexpr,  # fewer registers, for a few more instructions
):
    BINS: gl.constexpr = 2**LOG_BINS
    SHIFT: gl.constexpr = LOG_STEPS - LOG_BINS
    NEXT: gl.constexpr = SHIFT - LOG_BINS
    PARTS: gl.constexpr = 2 if GROUPS % 4 else 1
    # Before all else, and apart: where memory serves twice, the compiler puts a barrier between.
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = gl.allocate_shared_memory(gl.int32, [32], FLAT)
    totals_of_same = gl.allocate_shared_memory(gl.int32, [32], FLAT)
    i_t = gl.program_id(0).to(gl.int64)
    o_row = i_t * stride_in
    if HAS_STARTS:
        o_row += gl.load(starts + i_t)
    before = (o_row % 4).to(gl.int32)
    p_row = logits + gl.multiple_of(o_row - before, 4)
    p_top = topk + i_t * stride_topk
    if columns == 0:
        columns = gl.load(lengths + i_t)
    row = load_row(p_row, gl.multiple_of((before + columns + 3) // 4 * 4, 4), WARPS, GROUPS)
    bins = zero_bins(PARTS, LOG_BINS, WARPS)
    bins_of_few = zero_bins(1, LOG_BINS, WARPS)
    b_sample = sample(p_row, before, columns, WARPS)
    gl.barrier()  # or the length is waited for before all of it is asked for
    width = gl.load(lengths + i_t)
    if width != columns:
        b_sample = sample(p_row, before, width, WARPS)
    if (before > 0) | (width < 128 * WARPS * GROUPS):
        row = inside(row, before, width, WARPS, GROUPS)
    low, high = range_of(b_sample, width, k)
    margin = (high - low) * 0.125
    factor = 1.0 / ((high + margin) - (low - margin))
    offset = (margin - low) * factor
    steps = [steps_down(b_x, factor, offset) for b_x in row]

    bin, above, reach, _total = count([(b_u >> SHIFT) & (BINS - 1) for b_u in steps], bins, 0, k, WARPS, LOG_BINS)
    shift = gl.to_tensor(SHIFT)
    first = FIRST_STEP + (bin << SHIFT)
    if width <= k:
        reach = k + 1  # columns outside of the row were counted
    # The first and the last bin hold all that lies beyond the range as well.
    if (bin > 0) & (bin < BINS - 1) & (width > k) & (reach != k):
        held = reach - above
        shift = gl.to_tensor(NEXT)
        bin, above, reach, _total = count_between(
            steps,
            first.to(gl.uint32),
            gl.to_tensor(2**SHIFT - 1).to(gl.uint32),
            shift.to(gl.uint32),
            above,
            k,
            WARPS,
            LOG_BINS,
        )
        first += bin << shift
        if (reach != k) & (reach - above <= FEW):
            # One number of each thread, the nearest behind: rarely does one thread hold two of those that are left.
            b_next = nearest(steps, first)
            left = gl.to_tensor(NEXT - LOG_BINS)
            b_bin = bin_from(b_next, 0, left, LOG_BINS)
            count_in(bins_of_few[0], b_bin)
            b_held = held_in(bins_of_few, WARPS, LOG_BINS)
            bin_few, above_few, reach_few, total = locate(b_held, above, k, WARPS, LOG_BINS)
            if total == reach:
                held = reach - above
                bin, above, reach, shift = bin_few, above_few, reach_few, left
                first += bin << shift
        # Two numbers may be near each other; more that stay together from one round to the next are likely to be equal.
        while (reach != k) & (shift > 0) & ((reach - above != held) | (held <= 2)):
            held = reach - above
            by = gl.maximum(shift - LOG_BINS, 0)
            span = (1 << shift) - 1
            bin, above, reach, _total = count_between(
                steps, first.to(gl.uint32), span.to(gl.uint32), by.to(gl.uint32), above, k, WARPS, LOG_BINS
            )
            shift = by
            first += bin << shift
    last = (first + (1 << shift) - 1).to(gl.uint32)
    if reach != k:
        # Read anew, so that nothing is kept for this case in the other one.
        size = gl.load(lengths + i_t, volatile=True)
        again = load_row(p_row, gl.multiple_of((before + size + 3) // 4 * 4, 4), WARPS, GROUPS)
        steps = far_keys(again, before, size, WARPS, GROUPS)
        if size > k:
            # What no step told from the k-th best lies together in the order of keys, too.
            base, top = gl.to_tensor(0xFFFFFFFF).to(gl.uint32), gl.to_tensor(0).to(gl.uint32)
            for part in gl.static_range(PARTS):
                b_step = steps_down(again[part], factor, offset)
                m_left = (b_step >= first.to(gl.uint32)) & (b_step <= last) & (steps[part] != 0xFFFFFFFF)
                least, most = ends(steps[part], m_left)
                base, top = gl.minimum(base, least), gl.maximum(top, most)
            span = top - base
            while (reach != k) & (span > 0):
                # Bits of span minus those of a bin's number; rounding up to a power of two costs half of the bins.
                bits = (span.to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 126
                by = gl.maximum(bits - LOG_BINS, 0).to(gl.uint32)
                # Those before base wrap around, beyond span.
                bin, above, reach, _total = count_between(steps, base, span, by, above, k, WARPS, LOG_BINS)
                begin = bin.to(gl.uint32) << by
                base += begin
                span = gl.minimum(span - begin, (gl.to_tensor(1).to(gl.uint32) << by) - 1)
            last = base + span
            if reach != k:
                # All that are left equal the k-th best: the first ones are taken.
                same = [ones_where_equal(b_key, last) for b_key in steps]
                ones = ones_before(same, totals_of_same, WARPS)
                kept = ()
                for part in gl.static_range(PARTS):
                    b_rank = ones[part] + scan_fours(same[part])
                    b_key = steps[part]
                    kept += (gl.where((b_key == last) & (b_rank > k - above), 0xFFFFFFFF, b_key),)
                steps = kept
        else:
            last = gl.to_tensor(0xFFFFFFFE).to(gl.uint32)
            for part in gl.static_range(PARTS):
                o_t, o_r = places(WARPS, GROUPS)[part]
                gl.store(p_top + (o_t + o_r), -1, mask=(o_t + o_r >= size) & (o_t + o_r < k))
        steps = [(b_key > last).to(gl.uint32) for b_key in steps]
        last = gl.to_tensor(0).to(gl.uint32)

    # Negative where the column is taken: the sign is the flag, and neither predicates nor flags are kept. Numbers are
    # below 2^31 here.
    less = [(b_u - (last + 1)).to(gl.int32, bitcast=True) for b_u in steps]
    flags = [(b_less.to(gl.uint32, bitcast=True) >> 31).to(gl.int32) for b_less in less]
    ones = ones_before(flags, totals, WARPS)
    for part in gl.static_range(PARTS):
        o_t, o_r = places(WARPS, GROUPS)[part]
        if SPARING:
            store_fours(p_top, ones[part], (o_t - before) + o_r, less[part])
        else:
            store_each(p_top - 1, ones[part] + scan_fours(flags[part]), (o_t - before) + o_r, less[part])
