"""Scales of a super-block, from packed bytes to the fp32 numbers that multiply a group's sums: device code.

A scale byte times a half is exact in fp32, so a scale is what the dequantisation's formula says, not a rounding of it.
Formulae: reference.py.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: RET505, RUF005, SIM109
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.quants.formats import Scales

DENSE = tl.constexpr(int(Scales.DENSE))
BLOCK = tl.constexpr(int(Scales.BLOCK))
BLOCK_MIN = tl.constexpr(int(Scales.BLOCK_MIN))
K4 = tl.constexpr(int(Scales.K4))
K6 = tl.constexpr(int(Scales.K6))
K3 = tl.constexpr(int(Scales.K3))
K2 = tl.constexpr(int(Scales.K2))
X4 = tl.constexpr(int(Scales.X4))
E8 = tl.constexpr(int(Scales.E8))
NIBBLE = tl.constexpr(int(Scales.NIBBLE))
NIBBLE16 = tl.constexpr(int(Scales.NIBBLE16))
SIGNS = tl.constexpr(-0x7F7F7F80)  # 0x80808080


@triton.constexpr_function
def group_tiles(kind: int) -> int:
    """Tiles of 16 weights that share a scale."""
    return 1 if kind in (int(Scales.K6), int(Scales.K3), int(Scales.K2), int(Scales.NIBBLE16)) else 2


@triton.constexpr_function
def has_minimum(kind: int) -> bool:
    return kind in (int(Scales.K4), int(Scales.K2), int(Scales.BLOCK_MIN))


@triton.constexpr_function
def word_count(kind: int) -> int:
    """Words of a super-block that hold scales and minima in bytes or less, as `Format.word_count`."""
    if kind in (int(Scales.DENSE), int(Scales.BLOCK), int(Scales.BLOCK_MIN)):
        return 0
    if kind in (int(Scales.X4), int(Scales.NIBBLE)):
        return 1
    if kind in (int(Scales.NIBBLE16), int(Scales.E8)):
        return 2
    return 3 if kind in (int(Scales.K4), int(Scales.K3)) else 4


@triton.constexpr_function
def half_count(kind: int) -> int:
    """Halves of a super-block, as `Format.half_count`."""
    if kind in (int(Scales.DENSE), int(Scales.E8)):
        return 0
    if kind in (int(Scales.BLOCK), int(Scales.BLOCK_MIN)):
        return 8 if kind == int(Scales.BLOCK) else 16
    return 2 if kind in (int(Scales.K4), int(Scales.K2), int(Scales.X4)) else 1


@triton.jit
def _load_half(halves, start, at):
    """fp32 [BN] of the halves at start + at, read as the words they are in: pipelines copy no less than four bytes."""
    odd = (start & 1).to(tl.int32)
    at = at + odd
    word = tl.load((halves + (start - odd)).to(tl.pointer_type(tl.int32)) + (at >> 1))
    return (word >> ((at & 1) * 16)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_words(words, sb, n, N, COUNT: tl.constexpr):
    start = words + tl.cast(N, tl.int64) * sb * COUNT
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(start + N * k + n),)
    return found


@triton.jit
def _load_halves(halves, sb, n, N, COUNT: tl.constexpr):
    start = tl.cast(N, tl.int64) * sb * COUNT
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (_load_half(halves, start, N * k + n),)
    return found


@triton.jit
def load_scales(words, halves, sb, n, N, FMT: tl.constexpr):
    """A super-block's scales, still packed, for ``group_scale``: words of scale bytes, of minimum bytes, then halves.

    Which byte belongs to which group: ``scale_place``.
    """
    KIND: tl.constexpr = FMT[3]
    if KIND == DENSE:
        return (), (), ()
    elif KIND == BLOCK or KIND == BLOCK_MIN:
        return (), (), _load_halves(halves, sb, n, N, half_count(KIND))
    elif KIND == E8:
        return _load_words(words, sb, n, N, word_count(KIND)), (), ()
    else:
        W: tl.constexpr = word_count(KIND)
        found = _load_words(words, sb, n, N, W)
        a = found[0]
        b = found[1] if W > 1 else a
        c = found[2] if W > 2 else a
        d = found[3] if W > 3 else a
        if KIND == X4:
            start = tl.cast(N, tl.int64) * sb * 2
            held = (_load_half(halves, start, n),)
            at = N + n + (start & 1).to(tl.int32)
            b = tl.load((halves + (start - (start & 1))).to(tl.pointer_type(tl.int32)) + (at >> 1)) >> ((at & 1) * 16)
        else:
            held = _load_halves(halves, sb, n, N, half_count(KIND))
        scales, least = scale_bytes(a, b, c, d, KIND)
        return scales, least, held


@triton.jit
def scale_bytes(a, b, c, d, KIND: tl.constexpr):
    """A super-block's packed words as words of four groups' scale bytes and of minimum bytes, all int32 of one shape.

    Words that a kind lacks are not looked at; the second of IQ4_XS is its upper scale bits, two a group. Products with
    integers call this from Gluon as well.
    """
    if KIND == K4:
        s0 = a & 0x3F3F3F3F
        s1 = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
        m0 = b & 0x3F3F3F3F
        m1 = ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
        return (s0, s1), (m0, m1)
    elif KIND == K6:  # signed bytes, 128 added
        return (a ^ SIGNS, b ^ SIGNS, c ^ SIGNS, d ^ SIGNS), ()
    elif KIND == K2:
        scales = a & 0x0F0F0F0F, b & 0x0F0F0F0F, c & 0x0F0F0F0F, d & 0x0F0F0F0F
        least = (a >> 4) & 0x0F0F0F0F, (b >> 4) & 0x0F0F0F0F, (c >> 4) & 0x0F0F0F0F, (d >> 4) & 0x0F0F0F0F
        return scales, least
    elif KIND == K3:
        s0 = (a & 0x0F0F0F0F) | ((c << 4) & 0x30303030)
        s1 = (b & 0x0F0F0F0F) | ((c << 2) & 0x30303030)
        s2 = ((a >> 4) & 0x0F0F0F0F) | (c & 0x30303030)
        s3 = ((b >> 4) & 0x0F0F0F0F) | ((c >> 2) & 0x30303030)
        return (s0, s1, s2, s3), ()
    elif KIND == X4:  # even groups' go to the first word
        return (_upper_bits(a & 0x0F0F0F0F, b), _upper_bits((a >> 4) & 0x0F0F0F0F, b >> 2)), ()
    elif KIND == NIBBLE:
        return (a & 0x0F0F0F0F, (a >> 4) & 0x0F0F0F0F), ()
    else:
        return (a & 0x0F0F0F0F, (a >> 4) & 0x0F0F0F0F, b & 0x0F0F0F0F, (b >> 4) & 0x0F0F0F0F), ()


@triton.jit
def _upper_bits(word, u):
    """Four fields of two bits, four apart, on top of the nibbles of ``word``'s bytes."""
    return word | ((u & 3) << 4) | ((u & 0x30) << 8) | ((u & 0x300) << 12) | ((u & 0x3000) << 16)


@triton.constexpr_function
def scale_place(kind: int, g: int) -> tuple[int, int]:
    """(word, byte) of group g's scale among the words of ``load_scales``."""
    if kind in (int(Scales.X4), int(Scales.NIBBLE), int(Scales.NIBBLE16)):
        return 2 * (g // 8) + g % 2, g % 8 // 2
    return g // 4, g % 4


@triton.constexpr_function
def scale_bias(kind: int) -> float:
    """What a scale byte is too large by; nibbles lack a half."""
    return {int(Scales.K6): 128.0, int(Scales.K3): 32.0, int(Scales.X4): 32.0}.get(kind, 0.0)


@triton.constexpr_function
def scale_text(byte: int) -> str:
    """PTX: fp32 $0 = (byte of $1 on top of 2^15) * $2 + $3, exact where $3 is -(2^15 + bias) * $2 for a half $2.

    Second bytes of 16 bits are where a mantissa of 2^15 has its units.
    """
    shift = f"shl.b32 v, $1, {8 - 8 * byte};" if byte < 1 else f"shr.u32 v, $1, {8 * byte - 8};"
    lines = [shift] if byte != 1 else ["mov.b32 v, $1;"]
    lines += ["lop3.b32 v, v, 0xFF00, 0x47000000, 0xEA;", "fma.rn.f32 $0, v, $2, $3;"]
    return "{ .reg .b32 v; " + " ".join(lines) + " }"


@triton.jit
def _byte_times(word, B: tl.constexpr, d, BIAS: tl.constexpr, PTX: tl.constexpr):
    """(byte B of word - BIAS) * d, exact: eight bits times the eleven of a half."""
    if PTX:
        text: tl.constexpr = scale_text(B)
        return tl.inline_asm_elementwise(
            text, "=r,r,r,r", [word, d, d * (-32768.0 - BIAS)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return (((word >> (8 * B)) & 255).to(tl.float32) - BIAS) * d


@triton.jit
def group_scale(scales, G: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Scale and minimum / 128 of group G, fp32 [BN] each: weight = scale * (code - offset) - minimum."""
    KIND: tl.constexpr = FMT[3]
    words, least, halves = scales
    if KIND == BLOCK:
        return halves[G], halves[G]
    elif KIND == BLOCK_MIN:
        return halves[G], halves[8 + G] * (-1 / 128)
    elif KIND == E8:
        e = (words[G // 4] >> (8 * (G % 4))) & 255
        s = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23).to(tl.float32, bitcast=True)
        return s, s
    else:
        PLACE: tl.constexpr = scale_place(KIND, G)
        BIAS: tl.constexpr = scale_bias(KIND)
        d = halves[0] * FMT[5]
        s = _byte_times(words[PLACE[0]], PLACE[1], d, BIAS, PTX)
        if KIND == K4 or KIND == K2:
            return s, _byte_times(least[PLACE[0]], PLACE[1], halves[1] * (1 / 128), 0.0, PTX)
        elif KIND == NIBBLE or KIND == NIBBLE16:
            return s + d * 0.5, s
        else:
            return s, s
