"""Weights of K-quants as fp16 integers, scale times code: device code of products that scale a super-block's sum once.

A weight is d * (scale * code) - dmin * minimum. Scale, code and minimum are small integers; d and dmin belong to all
256 weights of a super-block. scale * code has at most 11 bits in Q4_K and Q5_K, so fp16 holds it exactly; the tensor
cores add it up over the whole super-block, and fp32 multiplies by d once in 256 weights instead of once a group
(tile_product.py does that), with nothing to wait for in between. In Q6_K, scale * (code - 32) has up to 13 bits, of
which those beyond 11 are rounded off.

Activations are fp16 too (activations.py). Codes of even tiles are put into the mantissa of 1024 (1024 + q), codes of
odd tiles as they lie, four bits further up (1024 + 16 q): no instruction moves them, as activations there are a
sixteenth.
"""

# Gluon reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.quants.formats import Scales
from glm5deploy.quants.integer_text import pair_text, tile_text

K4 = gl.constexpr(int(Scales.K4))  # with minima; else K6
MINIMA_TEXT = gl.constexpr(
    """{ .reg .b32 t, p;
    prmt.b32 t, $1, 0x64, $3;
    mov.b32 p, 0xE400E400;
    add.rn.f16x2 $0, t, p; }"""
)


@gluon.constexpr_function
def word_count(fmt):
    return 3 if fmt[3] == int(Scales.K4) else 4


@gluon.constexpr_function
def half_count(fmt):
    return 2 if fmt[3] == int(Scales.K4) else 1


@gluon.jit
def scale_bytes(a, b, c, d, FMT: gl.constexpr):
    """A super-block's words, int32 [BN, 1], as words of four groups' scale bytes and of minimum bytes; d: of Q6_K."""
    if FMT[3] == K4:
        s0 = a & 0x3F3F3F3F
        s1 = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
        m0 = b & 0x3F3F3F3F
        m1 = ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
        return (s0, s1), (m0, m1)
    else:  # signed, 128 added
        SIGNS: gl.constexpr = -0x7F7F7F80
        return (a ^ SIGNS, b ^ SIGNS, c ^ SIGNS, d ^ SIGNS), ()


@gluon.jit
def group_pair(word, UPPER: gl.constexpr, FMT: gl.constexpr):
    """The lower or upper two scale bytes of a word, int32 [BN, 1], in fp16; -1024 times as much where it is needed.

    Q6_K's signed scales are a sixteenth of themselves, so that no product leaves fp16's range.
    """
    text: gl.constexpr = pair_text(UPPER, FMT)
    if FMT[3] == K4:
        return gl.inline_asm_elementwise(text, "=&r,=r,r", [word], (gl.int32, gl.int32), True, 1)
    else:
        s = gl.inline_asm_elementwise(text, "=r,r", [word], gl.int32, True, 1)
        return s, s


@gluon.jit
def integer_tile(w, h, scales, I: gl.constexpr, FMT: gl.constexpr):
    """Tile I fp16 [BN, 16] of a super-block; w, h int16 [BN, 16]: the planes' elements that hold it.

    Four groups of 32 share a word of scales, of Q6_K four tiles.
    """
    GROUP: gl.constexpr = I // 2 if FMT[3] == K4 else I
    text: gl.constexpr = tile_text(FMT, I)
    s, z = group_pair(scales[GROUP // 4], GROUP % 4 >= 2, FMT)
    if FMT[3] == K4:
        if FMT[1] > 0:
            return gl.inline_asm_elementwise(text, "=r,r,r,r,r,r,r", [w, h, s, z], gl.float16, True, 2)
        else:
            return gl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [w, s, z], gl.float16, True, 2)
    else:
        return gl.inline_asm_elementwise(text, "=r,r,r,r,r", [w, h, s], gl.float16, True, 2)


@gluon.jit
def minimum_tile(least, A: gl.constexpr):
    """fp16 [BN, 16]: eight groups' minima, twice, for their sums of x and what rounding took off these."""
    j = gl.arange(0, 16, gl.SliceLayout(0, A))[None, :]
    word = gl.where((j & 4) == 0, least[0], least[1])
    selector = 0x4140 + 0x0101 * (j & 2)
    return gl.inline_asm_elementwise(MINIMA_TEXT, "=r,r,r,r,r", [word, selector], gl.float16, True, 2)
