"""Top-k of rows that one program holds in registers, in Gluon, by counting how far down the row's range columns are.

A sample gives the range that the numbers are likely in. Every number becomes a step down that range, 2^23 of them, by
two instructions that never swap two numbers; a few rounds of counting then find the step of the k-th best. No key is
made of a number's bits, no range is tested in the first round, and every warp finds the bin by itself, without a
barrier. Where steps do not tell the k-th best from the next, or the range was wrong, the row is read again and counted
by its numbers' bits: a poor sample costs time alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_KEY = gl.constexpr(2139095040)  # +inf's
# Steps are the bits of floats from 2^23 to 2^24 - 1: whole numbers in order.
FIRST_STEP = gl.constexpr(0x4B000000)
LOG_STEPS = gl.constexpr(23)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def places(WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """int32 [WARPS, 1, 32, 1] and [1, GROUPS, 1, 4], whose sums are 0 .. 128 * WARPS * GROUPS - 1.

    A warp holds neighbours, GROUPS times 128, so that what is before a warp is one number; a thread holds groups of
    four. Apart, because the second one is known when the kernel is compiled.
    """
    EACH: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    o_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[:, None, None, None]
    o_g = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[None, :, None, None]
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, EACH))))[None, None, :, None]
    o_j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, EACH))))[None, None, None, :]
    return o_w * (GROUPS * 128) + o_l * 4, o_g * 128 + o_j


@gluon.jit
def load_row(p_row, before, width, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """fp32 [WARPS, GROUPS, 32, 4] from p_row on in whole 16 bytes, NaN behind the row; and int32 0, 1, .. of it."""
    o_t, o_r = places(WARPS, GROUPS)
    end = gl.multiple_of((before + width + 3) // 4 * 4, 4)
    return gl.load((p_row + o_t) + o_r, mask=o_t + o_r < end, other=float("nan")), o_t + o_r


@gluon.jit
def sample(p_row, before, width, WARPS: gl.constexpr):
    """fp32 [32, 4], the same in every warp: 32 neighbours from each of four places of the row."""
    BOTH: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0]))
    o_l = gl.arange(0, 32, gl.SliceLayout(1, BOTH))[:, None]
    o_j = gl.arange(0, 4, gl.SliceLayout(0, BOTH))[None, :]
    first = gl.multiple_of((before + 3) // 4 * 4, 4)
    end = gl.multiple_of((before + width) // 4 * 4, 4)
    apart = gl.multiple_of(gl.maximum(end - first - 32, 0) // 12 * 4, 4)
    o_s = first + (o_l // 8) * apart + (o_l % 8) * 4 + o_j
    return gl.load(p_row + o_s, mask=o_s < end, other=float("nan"))


@gluon.jit
def steps_down(b_x, factor, offset):
    """uint32 from FIRST_STEP on, ascending as x * factor + offset descends from 1 to 0; NaN is the last one.

    Both instructions round, but never past each other: of two numbers the larger is not further down.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .f32 part;
        fma.rn.sat.f32 part, $1, $2, $3;
        fma.rn.f32 $0, part, 0fCAFFFFFE, 0f4B7FFFFF;
        }
        """,
        "=r,r,r,r",
        [b_x, factor, offset],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def far_keys(b_x, before, width, o_c):
    """uint32 in the opposite order of the numbers, 0 for +inf; -0 counts as 0, NaN as -inf; 2^32 - 1 outside."""
    # The sum makes -0 a 0, and the maximum of NaN and a number is the number.
    b_bits = gl.maximum(b_x + 0.0, float("-inf")).to(gl.int32, bitcast=True)
    b_far = (MOST_KEY - (b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF))).to(gl.uint32, bitcast=True)
    return gl.where((o_c >= before) & (o_c < before + width), b_far, 0xFFFFFFFF)


@gluon.jit
def find_bin(b_bin, above, k, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """Which of 2^LOG_BINS bins the k-th is in, how many are before it, and how many up to its end.

    `above` are before all bins; what is in none of them is not counted.
    """
    LINE: gl.constexpr = gl.BlockedLayout([1, 2**LOG_BINS // 32], [1, 32], [WARPS, 1], [1, 0])
    b_held = gl.histogram(gl.ravel(b_bin), 2**LOG_BINS, layout=gl.SliceLayout(0, LINE))
    b_reach = above + gl.associative_scan(b_held[None, :], 1, _add)
    b_short = b_reach < k
    bin = gl.sum(gl.sum(b_short.to(gl.int32), axis=1), axis=0)
    before = gl.max(gl.max(gl.where(b_short, b_reach, above), axis=1), axis=0)
    reach = gl.min(gl.min(gl.where(b_short, 0x7FFFFFFF, b_reach), axis=1), axis=0)
    return bin, before, reach


@gluon.jit
def rank(b_flag, totals, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """Of each one among ones and zeros in the order of `places`, how many ones there are up to it.

    int32 [WARPS, GROUPS, 32, 4]; totals: int32 [WARPS], shared memory.
    """
    FOURS: gl.constexpr = gl.SliceLayout(3, b_flag.type.layout)
    GROUP: gl.constexpr = gl.SliceLayout(2, FOURS)
    PAIR: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    WARP: gl.constexpr = gl.SliceLayout(1, PAIR)
    o_g = gl.arange(0, GROUPS, gl.SliceLayout(0, GROUP))[None, :]
    o_k = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, FOURS)))[None, :, None]
    b_four = gl.sum(b_flag, axis=3)
    b_lane = gl.zeros([WARPS, GROUPS, 32], gl.int32, FOURS)
    b_begin = gl.zeros([WARPS, GROUPS], gl.int32, GROUP)
    b_total = gl.zeros([WARPS], gl.int32, WARP)
    for pack in gl.static_range(GROUPS // 4):
        # Four groups side by side: a warp has at most 128 ones of each in a byte.
        m_k = o_k // 4 == pack
        b_packed = gl.sum(gl.where(m_k, b_four << (o_k % 4 * 8), 0), axis=1)
        b_packed = gl.convert_layout(b_packed, PAIR, assert_trivial=True)
        b_before = gl.associative_scan(b_packed, 1, _add) - b_packed
        b_before = gl.convert_layout(b_before, gl.SliceLayout(1, FOURS), assert_trivial=True)
        b_lane += gl.where(m_k, (b_before[:, None, :] >> (o_k % 4 * 8)) & 0xFF, 0)
        b_sum = gl.sum(b_packed, axis=1)
        for byte in gl.static_range(4):
            b_here = gl.convert_layout(b_total, gl.SliceLayout(1, GROUP), assert_trivial=True)
            b_begin += gl.where(o_g == pack * 4 + byte, b_here[:, None], 0)
            b_total += (b_sum >> (8 * byte)) & 0xFF
    totals.store(b_total)
    b_others = totals.load(gl.SliceLayout(0, PAIR))
    m_before = gl.arange(0, WARPS, gl.SliceLayout(0, PAIR))[None, :] < gl.arange(0, WARPS, WARP)[:, None]
    b_base = gl.sum(gl.where(m_before, b_others[None, :], 0), axis=1)
    b_begin += gl.convert_layout(b_base, gl.SliceLayout(1, GROUP), assert_trivial=True)[:, None]
    return (b_begin[:, :, None] + b_lane)[:, :, :, None] + gl.associative_scan(b_flag, 3, _add)


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
    b_u = steps_down(b_x, factor, (margin - low) * factor)

    SHIFT: gl.constexpr = LOG_STEPS - LOG_BINS
    bin, above, reach = find_bin(((b_u >> SHIFT) & (BINS - 1)).to(gl.int32), 0, k, WARPS, LOG_BINS)
    shift = gl.to_tensor(SHIFT)
    first = FIRST_STEP + (bin << SHIFT)
    if width <= k:
        reach = k + 1  # columns outside of the row were counted
    held = -1
    # The first and the last bin hold all that lies beyond the range as well.
    sure = (bin > 0) & (bin < BINS - 1) & (width > k)
    # What stays together from one round to the next is likely to be equal.
    while sure & (reach != k) & (shift > 0) & (reach - above != held):
        held = reach - above
        shift = gl.maximum(shift - LOG_BINS, 0)
        b_bin = ((b_u - first.to(gl.uint32)) >> shift.to(gl.uint32)).to(gl.int32)
        bin, above, reach = find_bin(b_bin, above, k, WARPS, LOG_BINS)
        first += bin << shift
    last = (first + (1 << shift) - 1).to(gl.uint32)
    if reach != k:
        # Read anew, so that nothing is kept for this case in the other one.
        size = gl.load(lengths + i_t, volatile=True)
        b_y, o_d = load_row(p_row, before, size, WARPS, GROUPS)
        b_u = far_keys(b_y, before, size, o_d)
        last = gl.to_tensor(0xFFFFFFFE).to(gl.uint32)
        if size > k:
            above = gl.to_tensor(0)
            reach = gl.to_tensor(0)
            shift = gl.to_tensor(32)
            base = gl.to_tensor(0).to(gl.uint32)
            while (reach != k) & (shift > 0):
                shift = gl.maximum(shift - LOG_BINS, 0)
                b_bin = ((b_u - base) >> shift.to(gl.uint32)).to(gl.int32)
                bin, above, reach = find_bin(b_bin, above, k, WARPS, LOG_BINS)
                base += (bin << shift).to(gl.uint32)
            last = base + ((1 << shift) - 1).to(gl.uint32)
            if reach != k:
                # All that are left equal the k-th best: the first ones are taken.
                b_rank = rank((b_u == last).to(gl.int32), totals, WARPS, GROUPS)
                b_u = gl.where((b_u == last) & (b_rank > k - above), 0xFFFFFFFF, b_u)
        else:
            gl.store(p_top + o_d, -1, mask=(o_d >= size) & (o_d < k))
        b_u = (b_u > last).to(gl.uint32)
        last = gl.to_tensor(0).to(gl.uint32)

    # Negative where the column is taken: the sign is the flag, and neither predicates nor flags are kept. Numbers are
    # below 2^31 here.
    b_less = (b_u - (last + 1)).to(gl.int32, bitcast=True)
    b_rank = rank((b_less.to(gl.uint32, bitcast=True) >> 31).to(gl.int32), totals, WARPS, GROUPS)
    o_t, o_r = places(WARPS, GROUPS)
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred keep;
        .reg .b64 place;
        setp.lt.s32 keep, $4, 0;
        mad.wide.u32 place, $2, 4, $1;
        @keep st.global.b32 [place], $3;
        mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [(p_top - 1).to(gl.int64), b_rank, (o_t - before) + o_r, b_less],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
