"""Device functions of the top-k kernels: keys in the order of the floats, the k-th largest of a block, places.

A block of 512 * WARPS values is a tensor [4, WARPS, 32, 4], in the order of its columns: a thread then holds four times
four neighbours, and counting needs shared memory between warps alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

# Keys of -inf, which NaN shares, and of +inf; outside a row's columns a block holds NO_KEY.
LEAST_KEY = tl.constexpr(-2139095041)
MOST_KEY = tl.constexpr(2139095040)
NO_KEY = tl.constexpr(-2147483648)


@triton.jit
def fours(WARPS: tl.constexpr):
    """int32 [4, WARPS, 32, 1]: the first of each four columns."""
    o_r = tl.arange(0, 4)[:, None, None, None] * (WARPS * 128)
    o_w = tl.arange(0, WARPS)[None, :, None, None] * 128
    return o_r + o_w + tl.arange(0, 32)[None, None, :, None] * 4


@triton.jit
def columns(WARPS: tl.constexpr):
    """int32 [4, WARPS, 32, 4]: 0 .. 512 * WARPS - 1."""
    return fours(WARPS) + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def row_begin(starts, lengths, i_t, stride_in, HAS_STARTS: tl.constexpr):
    """A row's length; where loading it begins, at a multiple of 16 bytes; and how many columns come before the row.

    Whole groups of four are loaded, also where the row begins or ends inside one.
    """
    width = tl.load(lengths + i_t)
    o_row = i_t * stride_in
    if HAS_STARTS:
        o_row += tl.load(starts + i_t)
    before = (o_row % 4).to(tl.int32)
    return width, tl.multiple_of(o_row - before, 4), before


@triton.jit
def mirrored(b_bits):
    """int32 in the order of fp32 numbers from their bits, and back. Gluon calls this as well."""
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def ordered_key(b_x):
    """fp32 -> int32 in the same order; -0 counts as 0 and NaN as -inf."""
    # The sum makes -0 a 0, and the maximum of NaN and a number is the number.
    return mirrored(tl.maximum(b_x + 0.0, float("-inf")).to(tl.int32, bitcast=True))


@triton.jit
def key_value(key):
    """The fp32 number of a key; NaN, which no number reaches, of one above +inf's."""
    return mirrored(key).to(tl.float32, bitcast=True)


@triton.jit
def _find_bin(b_bin, m_bin, above, k, slack, LOG_BINS: tl.constexpr):
    """Of 2^LOG_BINS bins that count downwards from the highest keys, the one that the k-th largest key is in.

    `above` keys are higher than all bins. Returns the bin, how many are higher than it, and whether k to k + slack are
    when its own are added.
    """
    b_held = tl.histogram(b_bin, 1 << LOG_BINS, mask=m_bin)
    b_reach = above + tl.cumsum(b_held, axis=0)
    b_above = b_reach - b_held
    # One bin matches: its number, how many are above it, whether the ones in it are few enough to take them all.
    b_found = (tl.arange(0, 1 << LOG_BINS) << 15) + (b_above << 1) + (b_reach <= k + slack).to(tl.int32)
    found = tl.max(tl.where((b_above < k) & (b_reach >= k), b_found, 0), axis=0)
    return found >> 15, (found >> 1) & 0x3FFF, found & 1


@triton.jit
def kth_key(b_key, high, least, k, slack, LOG_BINS: tl.constexpr):
    """low, above: of the keys `above` are higher than low, and with those that equal low there are k or more.

    Or, found earlier: `above` is negative, and between k and k + slack keys are low or more.

    b_key int32 [N] holds at least k keys of least .. high, N < 2^14, and elsewhere lower numbers. Each round counts the
    keys of a range in 2^LOG_BINS bins and goes on with the bin that the k-th largest is in.
    """
    above = 0
    done = 0
    shift = 1
    span = tl.sub(high, least, sanitize_overflow=False).to(tl.uint32, bitcast=True)
    while (shift > 0) & (done == 0):
        # Bits of span minus those of a bin's number; rounding up to a power of two costs half of the bins at worst.
        shift = tl.maximum((span.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - (126 + LOG_BINS), 0)
        b_far = tl.sub(high, b_key, sanitize_overflow=False).to(tl.uint32, bitcast=True)
        b_bin = (b_far >> shift.to(tl.uint32)).to(tl.int32)
        bin, above, done = _find_bin(b_bin, b_far <= span, above, k, slack, LOG_BINS)
        high = tl.sub(high, bin << shift, sanitize_overflow=False)
        left = tl.sub(high, least, sanitize_overflow=False).to(tl.uint32, bitcast=True)
        span = tl.minimum(((1 << shift) - 1).to(tl.uint32), left)
    low = tl.sub(high, span.to(tl.int32, bitcast=True), sanitize_overflow=False)
    return low, tl.where(done == 1, -1, above)


@triton.jit
def sample_threshold(p_row, before, width, k, SAMPLE: tl.constexpr):
    """A key that more than k of the `width` columns behind `before` very likely reach, or LEAST_KEY; width > k, 15.

    Looks at SAMPLE columns, eight neighbours at a time (a sector of memory where p_row begins one), spread evenly over
    the row. Of four that are a quarter of the row apart only the best is counted: a quarter of the work, for nearly the
    same certainty.
    """
    BEST: tl.constexpr = SAMPLE // 4
    GROUPS: tl.constexpr = SAMPLE // 8
    first = tl.multiple_of((before + 7) // 8 * 8, 8)
    eights = (before + width - first) // 8
    each = eights // GROUPS
    rest = eights % GROUPS
    o_s = tl.arange(0, BEST)
    b_x = tl.full([BEST], float("-inf"), tl.float32)
    for quarter in tl.static_range(4):
        b_group = o_s // 8 + quarter * (GROUPS // 4)
        b_begin = first + (b_group * each + b_group * rest // GROUPS) * 8
        b_x = tl.maximum(b_x, tl.load(p_row + b_begin + o_s % 8))
    # So many of them are expected to reach the k-th best; 4.25 standard deviations more for chance, and for likeness of
    # neighbours.
    less = 1.0 - k.to(tl.float32) / width
    less = less * less * (less * less)
    mean = BEST * (1.0 - less)
    rank = (mean + 4.25 * tl.sqrt(mean * less)).to(tl.int32) + 4
    least = tl.full((), LEAST_KEY, tl.int32)
    if rank < BEST:
        most = tl.full((), MOST_KEY, tl.int32)
        least, _above = kth_key(ordered_key(b_x), most, least, rank, rank // 16, LOG_BINS=8)
    return least


@triton.jit
def exclusive_count(b_flag, WARPS: tl.constexpr):
    """Ones before each element of a block of ones and zeros, in column order, and how many there are in all."""
    o_r = tl.arange(0, 4)
    b_four = tl.sum(b_flag, axis=3)
    # The four parts of a warp side by side: at most 128 in a byte.
    b_packed = tl.sum(b_four << (8 * o_r)[:, None, None], axis=0)
    b_before = tl.cumsum(b_packed, axis=1) - b_packed
    b_warp = tl.sum(b_packed, axis=1).to(tl.uint32, bitcast=True).to(tl.int64)
    # The same in 16 bits each, across warps.
    b_warp = (b_warp & 0xFF) | (b_warp & 0xFF00) << 8 | (b_warp & 0xFF0000) << 16 | (b_warp & 0xFF000000) << 24
    total = tl.sum(b_warp, axis=0)
    b_warp = tl.cumsum(b_warp, axis=0) - b_warp
    # Fields moved up by one are added up: what the parts before hold.
    earlier = (total << 16) + (total << 32) + (total << 48)
    b_warp += earlier
    o_shift = (16 * o_r)[:, None].to(tl.int64)
    b_part = ((b_warp[None, :] >> o_shift) & 0xFFFF).to(tl.int32)
    b_lane = (b_before[None, :, :] >> (8 * o_r)[:, None, None]) & 0xFF
    b_out = (b_part[:, :, None] + b_lane)[:, :, :, None] + tl.cumsum(b_flag, axis=3) - b_flag
    count = ((earlier >> 48) & 0xFFFF) + ((total >> 48) & 0xFFFF)
    return b_out, count.to(tl.int32)


@triton.jit
def select_keys(b_key, held, high, least, k, WARPS: tl.constexpr, LOG_BINS: tl.constexpr):
    """Keys and a number that exactly the k best of a block's `held` keys exceed; of equal ones the first are taken.

    All held keys are in least .. high. With no more than k of them all are taken.
    """
    low = LEAST_KEY - 1
    above = -1
    if held > k:
        low, above = kth_key(tl.reshape(b_key, [512 * WARPS]), high, least, k, 0, LOG_BINS)
        low -= 1
    if above >= 0:
        b_before, _count = exclusive_count((b_key == low + 1).to(tl.int32), WARPS)
        b_key = tl.where((b_key == low + 1) & (b_before >= k - above), NO_KEY, b_key)
    return b_key, low


@triton.jit
def scatter(p_out, o_out, b_value, b_key, low, ASM: tl.constexpr):
    """Store int32 values at offsets o_out where the key exceeds low.

    As assembly (ASM), since for a store with no two neighbouring addresses the compiler would first move pointers,
    values and mask through shared memory to another layout.
    """
    if ASM:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred keep;
            .reg .b64 place;
            setp.gt.s32 keep, $4, $5;
            mad.wide.s32 place, $2, 4, $1;
            @keep st.global.b32 [place], $3;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r,r",
            [p_out.to(tl.int64), o_out, b_value, b_key, low],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(p_out + o_out, b_value, mask=b_key > low)


@triton.jit
def scatter_pairs(p_out, o_out, b_x, b_position, reach, ASM: tl.constexpr):
    """Store int64 of fp32 numbers and, in the upper half, positions where the number reaches `reach`; as scatter."""
    if ASM:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred keep;
            .reg .b64 place;
            setp.ge.f32 keep, $3, $5;
            mad.wide.s32 place, $2, 8, $1;
            @keep st.global.v2.b32 [place], {$3, $4};
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r,r,r,r",
            [p_out.to(tl.int64), o_out, b_x, b_position, reach],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        b_pair = (b_position.to(tl.int64) << 32) | (b_x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
        tl.store(p_out + o_out, b_pair, mask=b_x >= reach)
