"""Device functions of `topk_steps`: how many of a row's columns are taken before each, and where it is stored."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.kernels.topk_steps_device import add, line_layout


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
def ones_in_warp(b_flag, b_total, WARPS: gl.constexpr):
    """Of ones and zeros, how many are ones before each four neighbours of their warp, and how many there are in all.

    b_flag: int32 [WARPS, groups, 32, 4]; b_total: int32 [WARPS], ones before all of these.
    """
    FOURS: gl.constexpr = gl.SliceLayout(3, b_flag.type.layout)
    GROUP: gl.constexpr = gl.SliceLayout(2, FOURS)
    LINE: gl.constexpr = line_layout(WARPS)
    GROUPS: gl.constexpr = b_flag.shape[1]
    SIDES: gl.constexpr = 4 if GROUPS > 4 else GROUPS
    o_g = gl.arange(0, GROUPS, gl.SliceLayout(0, GROUP))[None, :]
    o_k = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, FOURS)))[None, :, None]
    b_four = gl.sum(b_flag, axis=3)
    b_lane = gl.zeros([WARPS, GROUPS, 32], gl.int32, FOURS)
    b_begin = gl.zeros([WARPS, GROUPS], gl.int32, GROUP)
    for pack in gl.static_range(GROUPS // SIDES):
        # Up to four groups side by side: a warp has at most 128 ones of each in a byte.
        m_k = o_k // 4 == pack
        b_packed = gl.sum(gl.where(m_k, b_four << (o_k % 4 * 8), 0), axis=1)
        b_packed = gl.convert_layout(b_packed, LINE, assert_trivial=True)
        b_before = gl.associative_scan(b_packed, 1, add) - b_packed
        b_before = gl.convert_layout(b_before, gl.SliceLayout(1, FOURS), assert_trivial=True)
        b_lane += gl.where(m_k, (b_before[:, None, :] >> (o_k % 4 * 8)) & 0xFF, 0)
        b_sum = gl.sum(b_packed, axis=1)
        for byte in gl.static_range(SIDES):
            b_here = gl.convert_layout(b_total, gl.SliceLayout(1, GROUP), assert_trivial=True)
            b_begin += gl.where(o_g == pack * 4 + byte, b_here[:, None], 0)
            b_total += (b_sum >> (8 * byte)) & 0xFF
    return b_begin[:, :, None] + b_lane, b_total


@gluon.jit
def ones_before(flags, totals, WARPS: gl.constexpr):
    """How many of a row's ones and zeros are ones before each four neighbours: int32 [WARPS, groups, 32, 1].

    totals: int32 [32], shared memory: as many as a warp has threads, which add them up in one instruction.
    """
    LINE: gl.constexpr = line_layout(WARPS)
    WARP: gl.constexpr = gl.SliceLayout(1, LINE)
    OTHER: gl.constexpr = gl.SliceLayout(0, LINE)
    b_ones, b_total = ones_in_warp(flags[0], gl.zeros([WARPS], gl.int32, WARP), WARPS)
    found = (b_ones,)
    for part in gl.static_range(1, len(flags)):
        b_ones, b_total = ones_in_warp(flags[part], b_total, WARPS)
        found += (b_ones,)
    totals.slice(0, WARPS).store(b_total)
    m_before = gl.arange(0, 32, OTHER)[None, :] < gl.arange(0, WARPS, WARP)[:, None]
    b_base = gl.sum(gl.where(m_before, totals.load(OTHER)[None, :], 0), axis=1)
    b_base = gl.convert_layout(b_base, gl.SliceLayout(1, gl.SliceLayout(2, found[0].type.layout)), assert_trivial=True)
    return [(b_ones + b_base[:, None, None])[:, :, :, None] for b_ones in found]


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
