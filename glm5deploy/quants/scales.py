"""Scales of a super-block, from packed bytes to what multiplies a tile: device code.

A scale byte times a half is exact in fp32; that product is rounded to bf16 once, and what the rounding cut off is kept
beside it. Formulae: reference.py.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505, SIM109
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


@triton.jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_scales(words, halves, sb, n, N, FMT: tl.constexpr):
    """A super-block's scales, still packed: four words of scale bytes, two or four of minimum bytes, d and dmin fp32.

    Returns (w0, w1, w2, w3, v0, v1, v2, v3, d, dmin), [BN] each; entries that a format does not have repeat another.
    Which byte belongs to which group: ``_place``.
    """
    KIND: tl.constexpr = FMT[3]
    row = tl.cast(N, tl.int64) * sb
    w0, w1, w2, w3 = n, n, n, n
    v0, v1, v2, v3 = n, n, n, n
    d = tl.zeros(n.shape, tl.float32)
    m = d
    if KIND == K4:
        a = tl.load(words + row * 3 + n)
        b = tl.load(words + row * 3 + N + n)
        c = tl.load(words + row * 3 + 2 * N + n)
        w0, v0 = a & 0x3F3F3F3F, b & 0x3F3F3F3F
        w1 = (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)
        v1 = ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)
    elif KIND == K6 or KIND == K2:
        w0 = tl.load(words + row * 4 + n)
        w1 = tl.load(words + row * 4 + N + n)
        w2 = tl.load(words + row * 4 + 2 * N + n)
        w3 = tl.load(words + row * 4 + 3 * N + n)
        if KIND == K6:  # signed bytes, 128 added
            w0, w1, w2, w3 = w0 ^ SIGNS, w1 ^ SIGNS, w2 ^ SIGNS, w3 ^ SIGNS
        else:
            v0, v1 = (w0 >> 4) & 0x0F0F0F0F, (w1 >> 4) & 0x0F0F0F0F
            v2, v3 = (w2 >> 4) & 0x0F0F0F0F, (w3 >> 4) & 0x0F0F0F0F
            w0, w1, w2, w3 = w0 & 0x0F0F0F0F, w1 & 0x0F0F0F0F, w2 & 0x0F0F0F0F, w3 & 0x0F0F0F0F
    elif KIND == K3:
        a = tl.load(words + row * 3 + n)
        b = tl.load(words + row * 3 + N + n)
        c = tl.load(words + row * 3 + 2 * N + n)
        w0 = (a & 0x0F0F0F0F) | ((c << 4) & 0x30303030)
        w1 = (b & 0x0F0F0F0F) | ((c << 2) & 0x30303030)
        w2 = ((a >> 4) & 0x0F0F0F0F) | (c & 0x30303030)
        w3 = ((b >> 4) & 0x0F0F0F0F) | ((c >> 2) & 0x30303030)
    elif KIND == E8:
        w0 = tl.load(words + row * 2 + n)
        w1 = tl.load(words + row * 2 + N + n)
    elif KIND == X4 or KIND == NIBBLE:
        a = tl.load(words + row + n)
        w0, w1 = a & 0x0F0F0F0F, (a >> 4) & 0x0F0F0F0F
        if KIND == X4:  # two more bits a group, consecutive in 16: even groups' go to w0, odd groups' to w1
            u = tl.load(halves + row * 2 + N + n).to(tl.int32)
            w0 |= ((u & 3) << 4) | ((u & 0x30) << 8) | ((u & 0x300) << 12) | ((u & 0x3000) << 16)
            u = u >> 2
            w1 |= ((u & 3) << 4) | ((u & 0x30) << 8) | ((u & 0x300) << 12) | ((u & 0x3000) << 16)
    elif KIND == NIBBLE16:
        a = tl.load(words + row * 2 + n)
        b = tl.load(words + row * 2 + N + n)
        w0, w1 = a & 0x0F0F0F0F, (a >> 4) & 0x0F0F0F0F
        w2, w3 = b & 0x0F0F0F0F, (b >> 4) & 0x0F0F0F0F
    if KIND == K4 or KIND == K2 or KIND == X4:
        d = _half(tl.load(halves + row * 2 + n))
        if KIND != X4:
            m = _half(tl.load(halves + row * 2 + N + n))
    elif KIND == K3 or KIND == K6 or KIND == NIBBLE or KIND == NIBBLE16:
        d = _half(tl.load(halves + row + n)) * FMT[5]
    return w0, w1, w2, w3, v0, v1, v2, v3, d, m


@triton.constexpr_function
def _place(kind: int, g: int) -> tuple[int, int]:
    """(word, byte) of group g's scale among the words of ``load_scales``."""
    if kind in (int(Scales.X4), int(Scales.NIBBLE), int(Scales.NIBBLE16)):
        return 2 * (g // 8) + g % 2, g % 8 // 2
    return g // 4, g % 4


@triton.constexpr_function
def _bias(kind: int) -> float:
    """What a scale byte is too large by."""
    return {int(Scales.K6): 128.0, int(Scales.K3): 32.0, int(Scales.X4): 32.0}.get(kind, 0.0) - (
        0.5 if kind in (int(Scales.NIBBLE), int(Scales.NIBBLE16)) else 0.0
    )


@triton.constexpr_function
def scale_text(byte: int) -> str:
    """PTX: fp32 $0 = (byte of $1) * $2 + $3, exact: the byte sits in the mantissa of 2^23, and $3 takes 2^23 $2 off."""
    return f"{{ .reg .b32 f, k; mov.b32 k, 0x4B000000; prmt.b32 f, $1, k, 0x744{byte}; fma.rn.f32 $0, f, $2, $3; }}"


@triton.jit
def _byte_times(word, B: tl.constexpr, d, BIAS: tl.constexpr, PTX: tl.constexpr):
    """(byte B of word - BIAS) * d, exact: eight bits times the eleven of a half."""
    if PTX:
        text: tl.constexpr = scale_text(B)
        s = tl.inline_asm_elementwise(
            text, "=r,r,r,r", [word, d, d * -8388608.0], dtype=tl.float32, is_pure=True, pack=1
        )
        return s - d * BIAS if BIAS != 0 else s
    else:
        return (((word >> (8 * B)) & 255).to(tl.float32) - BIAS) * d


@triton.jit
def _twice(s, PTX: tl.constexpr):
    """fp32 to a pair of equal bf16 in an int32, for two neighbouring weights, and what that cut off, likewise."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 $0, $2, $2; and.b32 t, $0, 0xFFFF0000; sub.f32 t, $2, t;"
            " cvt.rn.bf16x2.f32 $1, t, t; }",
            "=r,=r,r",
            [s],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return s, s


@triton.jit
def _group_scale(scales, halves, sb, n, N, G: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Scale, its remainder and the rest of the minimum [BN] of group G: weight = scale * (code - zero) + rest."""
    KIND: tl.constexpr = FMT[3]
    PLACE: tl.constexpr = _place(KIND, G)
    BIAS: tl.constexpr = _bias(KIND)
    rest = tl.zeros(n.shape, tl.float32)
    if KIND == BLOCK:
        s = _half(tl.load(halves + tl.cast(N, tl.int64) * sb * 8 + (G * N + n)))
    elif KIND == BLOCK_MIN:
        s = _half(tl.load(halves + tl.cast(N, tl.int64) * sb * 16 + (G * N + n)))
        rest = s * FMT[2] + _half(tl.load(halves + tl.cast(N, tl.int64) * sb * 16 + ((8 + G) * N + n)))
    elif KIND == E8:
        e = (scales[PLACE[0]] >> (8 * PLACE[1])) & 255
        s = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23).to(tl.float32, bitcast=True)
    else:
        s = _byte_times(scales[PLACE[0]], PLACE[1], scales[8], BIAS, PTX)
        if KIND == K4 or KIND == K2:
            rest = s * FMT[2] + _byte_times(scales[4 + PLACE[0]], PLACE[1], -scales[9], 0.0, PTX)
    s, r = _twice(s, PTX)
    c, _ = _twice(rest, PTX)
    return s, r, c


@triton.jit
def tile_scale(scales, halves, sb, n, N, I: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Scale, remainder and rest of tile I: [BN, 1], or [BN, 32] for groups of 16."""
    KIND: tl.constexpr = FMT[3]
    if KIND == K6 or KIND == K3 or KIND == K2 or KIND == NIBBLE16:
        s0, r0, c0 = _group_scale(scales, halves, sb, n, N, 2 * I, FMT, PTX)
        s1, r1, c1 = _group_scale(scales, halves, sb, n, N, 2 * I + 1, FMT, PTX)
        first = tl.arange(0, 32)[None, :] < 16
        s = tl.where(first, s0[:, None], s1[:, None])
        r = tl.where(first, r0[:, None], r1[:, None])
        return s, r, tl.where(first, c0[:, None], c1[:, None])
    else:
        s, r, c = _group_scale(scales, halves, sb, n, N, I, FMT, PTX)
        return s[:, None], r[:, None], c[:, None]
