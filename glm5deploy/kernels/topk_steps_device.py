"""Device functions of `topk_steps`: layouts, columns of a row, its sample and its steps.

A row is held by WARPS warps, each of which holds GROUPS times 128 neighbours: what is before a warp is one number.
Tensors have a power of two of everything, so a row is a tuple: of one tensor, or of two where GROUPS is 6.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.kernels.topk_device import mirrored

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
def add(a, b):
    return a + b


@gluon.jit
def places(WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """For each tensor of a row int32 [WARPS, 1, 32, 1] and [1, groups, 1, 4], whose sums are its columns.

    Apart, because the second one is known when the kernel is compiled.
    """
    EACH: gl.constexpr = each_layout(WARPS)
    o_w = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[:, None, None, None]
    o_l = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, EACH))))[None, None, :, None]
    o_j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, EACH))))[None, None, None, :]
    o_t = o_w * (GROUPS * 128) + o_l * 4
    FULL: gl.constexpr = GROUPS // 4 * 4
    o_g = gl.arange(0, FULL, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))[None, :, None, None]
    found = ((o_t, o_g * 128 + o_j),)
    if GROUPS > FULL:
        o_g = gl.arange(0, GROUPS - FULL, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, EACH))))
        found += ((o_t, (o_g[None, :, None, None] + FULL) * 128 + o_j),)
    return found


@gluon.jit
def load_row(p_row, end, WARPS: gl.constexpr, GROUPS: gl.constexpr):
    """fp32 from p_row on in whole 16 bytes; any numbers from `end` on, a multiple of 4."""
    return [gl.load((p_row + o[0]) + o[1], mask=o[0] + o[1] < end) for o in places(WARPS, GROUPS)]


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
def range_of(b_sample, width, k):
    """Numbers that the k-th best of `width` is very likely between, from a sample of them."""
    b_high = gl.max(b_sample, axis=1)
    # The nearer the range, the fewer rounds it takes. Of 32 numbers that are the best of four each, the least is below
    # the best third of the row but for one row in a million, with the margin that is added to the range.
    b_low = gl.where(width > 3 * k, b_high, gl.min(b_sample, axis=1))
    b_low = gl.minimum(b_low, float("inf")).to(gl.int32, bitcast=True)  # of NaN and a number, the number
    b_high = gl.maximum(b_high, float("-inf")).to(gl.int32, bitcast=True)
    # Integers are reduced by one instruction a warp.
    low = mirrored(gl.min(mirrored(b_low), axis=0)).to(gl.float32, bitcast=True)
    return low, mirrored(gl.max(mirrored(b_high), axis=0)).to(gl.float32, bitcast=True)


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
