"""Device functions of `topk_steps`: layouts, columns of a row, steps, bins and ranks.

A row is held by WARPS warps, each of which holds GROUPS times 128 neighbours: what is before a warp is one number.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Steps are the bits of floats from 2^23 to 2^24 - 1: whole numbers in order.
FIRST_STEP = gl.constexpr(0x4B000000)
LOG_STEPS = gl.constexpr(23)


@gluon.constexpr_function
def each_layout(WARPS):
    """Of a row's columns, [WARPS, GROUPS, 32, 4]."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def line_layout(WARPS, each=1):
    """[n, 32 * each]: the second dimension within a warp. The same in every warp where n is 1."""
    return gl.BlockedLayout([1, each], [1, 32], [WARPS, 1], [1, 0])


@gluon.constexpr_function
def sample_layout(WARPS):
    """Of the sample, [1, 32, 4]: the same in every warp."""
    return gl.BlockedLayout([1, 1, 4], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def scan_fours(b_flag):
    """Sums up to each of four neighbours, in fewer registers than Gluon's scan."""
    return gl.inline_asm_elementwise(
        """
        mov.b32 $0, $4;
        add.s32 $1, $0, $5;
        add.s32 $2, $1, $6;
        add.s32 $3, $2, $7;
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r",
        [b_flag],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def ones_where_equal(b_a, b):
    """int32; comparing tensors, the compiler packs the results into bytes that it keeps in memory."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred same; setp.eq.b32 same, $1, $2; selp.b32 $0, 1, 0, same; }",
        "=r,r,r",
        [b_a, b],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def places(WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """int32 [WARPS, 1, 32, 1] and [1, GROUPS, 1, 4], whose sums are 0, 1, 2, ..

    Apart, because the second one is known when the kernel is compiled.
    """
    EACH: gl.constexpr = each_layout(WARPS)
    o_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[:, None, None, None]
    o_g = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[None, :, None, None]
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, EACH))))[None, None, :, None]
    o_j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, EACH))))[None, None, None, :]
    return o_w * (GROUPS * 128) + o_l * 4, o_g * 128 + o_j


@gluon.jit
def load_row(p_row, before, width, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """fp32 [WARPS, GROUPS, 32, 4] from p_row on in whole 16 bytes, NaN behind the row; and their places."""
    o_t, o_r = places(WARPS, GROUPS)
    end = gl.multiple_of((before + width + 3) // 4 * 4, 4)
    return gl.load((p_row + o_t) + o_r, mask=o_t + o_r < end, other=float("nan")), o_t + o_r


@gluon.jit
def sample(p_row, before, width, WARPS: gl.constexpr):
    """fp32 [32, 4], the same in every warp: 32 neighbours from each of four places of the row."""
    BOTH: gl.constexpr = gl.SliceLayout(0, sample_layout(WARPS))
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
def find_bin(b_bin, m_bin, above, k, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """Which of 2^LOG_BINS bins the k-th is in, how many are before it, and how many up to its end.

    `above` are before all bins; m_bin tells which numbers are in one, as Gluon promises nothing about others. Every
    warp finds the bin by itself.
    """
    LINE: gl.constexpr = line_layout(WARPS, 2**LOG_BINS // 32)
    b_held = gl.histogram(gl.ravel(b_bin), 2**LOG_BINS, mask=gl.ravel(m_bin), layout=gl.SliceLayout(0, LINE))
    b_reach = above + gl.associative_scan(b_held[None, :], 1, _add)
    b_short = b_reach < k
    bin = gl.sum(gl.sum(b_short.to(gl.int32), axis=1), axis=0)
    before = gl.max(gl.max(gl.where(b_short, b_reach, above), axis=1), axis=0)
    reach = gl.min(gl.min(gl.where(b_short, 0x7FFFFFFF, b_reach), axis=1), axis=0)
    return bin, before, reach


@gluon.jit
def ends(b_key, m_key):
    """The least and the largest of the uint32 keys that m_key names, of which there are some."""
    least = gl.min(gl.ravel(gl.where(m_key, b_key, 0xFFFFFFFF)), axis=0)
    return least, gl.max(gl.ravel(gl.where(m_key, b_key, 0)), axis=0)


@gluon.jit
def ones_before(b_flag, totals, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """How many of the ones and zeros b_flag, in the order of `places`, are ones before each four neighbours.

    b_flag: int32 [WARPS, GROUPS, 32, 4]; totals: int32 [WARPS], shared memory; returns int32 [WARPS, GROUPS, 32, 1].
    """
    FOURS: gl.constexpr = gl.SliceLayout(3, b_flag.type.layout)
    GROUP: gl.constexpr = gl.SliceLayout(2, FOURS)
    LINE: gl.constexpr = line_layout(WARPS)
    WARP: gl.constexpr = gl.SliceLayout(1, LINE)
    OTHER: gl.constexpr = gl.SliceLayout(0, LINE)
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
        b_packed = gl.convert_layout(b_packed, LINE, assert_trivial=True)
        b_before = gl.associative_scan(b_packed, 1, _add) - b_packed
        b_before = gl.convert_layout(b_before, gl.SliceLayout(1, FOURS), assert_trivial=True)
        b_lane += gl.where(m_k, (b_before[:, None, :] >> (o_k % 4 * 8)) & 0xFF, 0)
        b_sum = gl.sum(b_packed, axis=1)
        for byte in gl.static_range(4):
            b_here = gl.convert_layout(b_total, gl.SliceLayout(1, GROUP), assert_trivial=True)
            b_begin += gl.where(o_g == pack * 4 + byte, b_here[:, None], 0)
            b_total += (b_sum >> (8 * byte)) & 0xFF
    totals.store(b_total)
    m_before = gl.arange(0, WARPS, OTHER)[None, :] < gl.arange(0, WARPS, WARP)[:, None]
    b_base = gl.sum(gl.where(m_before, totals.load(OTHER)[None, :], 0), axis=1)
    b_begin += gl.convert_layout(b_base, gl.SliceLayout(1, GROUP), assert_trivial=True)[:, None]
    return (b_begin[:, :, None] + b_lane)[:, :, :, None]


@gluon.jit
def store_each(p_before, b_rank, b_value, b_less):
    """Store int32 values where b_less is negative, one behind the other from behind p_before; b_rank counts from 1."""
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
        [p_before.to(gl.int64), b_rank, b_value, b_less],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def store_fours(p_out, b_before, b_value, b_less):
    """The same, from p_out on, by `ones_before` of them: no place is kept in a register, but each waits for another."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred keep;
        .reg .b32 one, rank;
        .reg .b64 place;
        setp.lt.s32 keep, $16, 0;
        mad.wide.u32 place, $8, 4, $4;
        @keep st.global.b32 [place], $12;
        shr.u32 one, $16, 31;
        add.u32 rank, $8, one;
        setp.lt.s32 keep, $17, 0;
        mad.wide.u32 place, rank, 4, $4;
        @keep st.global.b32 [place], $13;
        shr.u32 one, $17, 31;
        add.u32 rank, rank, one;
        setp.lt.s32 keep, $18, 0;
        mad.wide.u32 place, rank, 4, $4;
        @keep st.global.b32 [place], $14;
        shr.u32 one, $18, 31;
        add.u32 rank, rank, one;
        setp.lt.s32 keep, $19, 0;
        mad.wide.u32 place, rank, 4, $4;
        @keep st.global.b32 [place], $15;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        }
        """,
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r,r,r,r,r,r,r,r,r",
        [p_out.to(gl.int64), b_before, b_value, b_less],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
