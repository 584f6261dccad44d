"""Weights as fp16 integers, scale times code: device code of products that scale a super-block's sum once.

Of types with blocks of 256, a weight is d * (scale * code) - dmin * minimum, d * (scale * (code - offset)) or
d * (scale * table[code]). Scale, code and minimum are small integers; d and dmin belong to all 256 weights of a
super-block. scale * code has at most 11 bits, so fp16 holds it exactly; the tensor cores add it up over the whole
super-block, and fp32 multiplies by d once in 256 weights instead of once a group (tile_product.py does that), with
nothing to wait for in between. In Q6_K and IQ4_XS it has up to 13 bits, of which those beyond 11 are rounded off.

Activations are fp16 too (activations.py). Codes are put into the mantissa of 1024 as they lie in a byte of the plane,
2^lifted higher: no instruction moves them. Activations of odd tiles are a sixteenth, which is what a nibble's place
makes of a code; two-bit codes have the rest in their scales, and tables' numbers are made 16 times as large.
"""

# Gluon reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.quants.integer_text import interleaved, pair_text, tile_group, tile_text
from glm5deploy.quants.scales import K4, has_minimum, scale_place

MINIMA_TEXT = gl.constexpr(
    """{ .reg .b32 t, p;
    prmt.b32 t, $1, 0x64, $3;
    mov.b32 p, 0xE400E400;
    add.rn.f16x2 $0, t, p; }"""
)


@gluon.jit
def group_pair(scales, GROUP: gl.constexpr, FMT: gl.constexpr):
    """Two groups' scales in fp16, int32 [BN, 1], from ``scale_bytes``' words; with minima also -1024 times as much."""
    text: gl.constexpr = pair_text(FMT, GROUP)
    word = scales[scale_place(FMT[3], GROUP)[0]]
    if interleaved(FMT):
        words = [word, scales[scale_place(FMT[3], GROUP + 1)[0]]]
        s = gl.inline_asm_elementwise(text, "=r,r,r", words, gl.int32, True, 1)
        return s, s
    elif has_minimum(FMT[3]):
        return gl.inline_asm_elementwise(text, "=&r,=r,r", [word], (gl.int32, gl.int32), True, 1)
    else:
        s = gl.inline_asm_elementwise(text, "=r,r", [word], gl.int32, True, 1)
        return s, s


@gluon.jit
def integer_tile(w, h, scales, I: gl.constexpr, FMT: gl.constexpr):
    """Tile I fp16 [BN, 16] of a super-block; w, h int16 [BN, 16]: the planes' elements that hold it."""
    GROUP: gl.constexpr = tile_group(FMT, I)
    text: gl.constexpr = tile_text(FMT, I)
    s, z = group_pair(scales, GROUP // 2 * 2, FMT)
    if has_minimum(FMT[3]):
        if FMT[1] > 0:
            return gl.inline_asm_elementwise(text, "=r,r,r,r,r,r,r", [w, h, s, z], gl.float16, True, 2)
        else:
            return gl.inline_asm_elementwise(text, "=r,r,r,r,r,r", [w, s, z], gl.float16, True, 2)
    elif FMT[1] > 0:
        return gl.inline_asm_elementwise(text, "=r,r,r,r,r", [w, h, s], gl.float16, True, 2)
    else:
        return gl.inline_asm_elementwise(text, "=r,r,r,r", [w, s], gl.float16, True, 2)


@gluon.jit
def minimum_tile(least, FMT: gl.constexpr, A: gl.constexpr):
    """fp16 [BN, 16]: the minimum of each tile."""
    i = gl.arange(0, 16, gl.SliceLayout(0, A))[None, :]
    if FMT[3] == K4:  # of two tiles
        word = gl.where(i < 8, least[0], least[1])
        selector = 0x4040 + 0x0101 * ((i >> 1) & 3)
    else:
        word = gl.where(i < 8, gl.where((i & 4) == 0, least[0], least[1]), gl.where((i & 4) == 0, least[2], least[3]))
        selector = 0x4140 + 0x0101 * (i & 2)
    return gl.inline_asm_elementwise(MINIMA_TEXT, "=r,r,r,r,r", [word, selector], gl.float16, True, 2)
