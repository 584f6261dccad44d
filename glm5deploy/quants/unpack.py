"""From planes to bf16 tiles in registers: the device code that all products share.

A super-block is multiplied as eight tiles [BN, 32]; ``code_pair`` returns tiles 2p and 2p + 1 as exact integers, and
``scaled`` turns a tile into weights. On a GPU both are a few instructions on two weights at a time: a code is put into
a bf16's mantissa (0x4300 | q is 128 + q), 128 and the middle of the code's range are taken off, exact in bf16, and one
fused multiply-add applies scale and minimum. Scale and the rest of the minimum are computed in fp32 and rounded to bf16
once. Where the activations are no bf16 (interpreter, tests) the same formulae run in fp32 without assembly.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505, SIM109
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from glm5deploy.quants.scales import BLOCK_MIN, DENSE, K2, K4, load_scales, tile_scale


@triton.constexpr_function
def _bf16_pair(number: int) -> str:
    """Two copies of an integer below 256 in magnitude as a bf16x2 literal."""
    if number == 0:
        return "0x00000000"
    exponent = abs(number).bit_length() - 1
    bits = ((number < 0) << 15) | ((127 + exponent) << 7) | ((abs(number) << (7 - exponent)) & 0x7F)
    assert exponent <= 7, number
    return f"0x{bits:04X}{bits:04X}"


@triton.constexpr_function
def _shift(target: str, source: str, left: int) -> str:
    return f"shl.b32 {target}, {source}, {left};" if left >= 0 else f"shr.u32 {target}, {source}, {-left};"


@triton.constexpr_function
def _insert(target: str, source: str, mask: int) -> str:
    """target = (source & mask in both halves) | target."""
    return f"lop3.b32 {target}, {source}, 0x{mask:04X}{mask:04X}, {target}, 0xEA;"


@triton.constexpr_function
def _integers(out: str, source: str) -> list[str]:
    """Signed bytes in the low half of each 16 bits to bf16: (128 + low seven bits) - (128 or, if negative, 256)."""
    return [
        f"lop3.b32 a, {source}, 0x007F007F, magic, 0xEA;",
        f"lop3.b32 b, {source}, 0x00800080, magic, 0xEA;",
        f"fma.rn.bf16x2 {out}, b, minus, a;",
    ]


@triton.constexpr_function
def _table_lines(table: tuple[int, ...]) -> list[str]:
    packed = [sum((table[4 * k + n] & 0xFF) << (8 * n) for n in range(4)) for k in range(len(table) // 4)]
    return [f"mov.b32 t{k}, 0x{value:08X};" for k, value in enumerate(packed)]


@triton.constexpr_function
def pair_text(fmt: tuple[Any, ...], p: int) -> str:
    """PTX for tiles 2p ($0) and 2p + 1 ($1) from elements j, j + 1 of a plane: $2, $3, and of ``high``: $4, $5."""
    low, high, zero, _, table, _, _ = fmt
    lines = [".reg .b32 a, b, h, t, v, t0, t1, t2, t3, magic, one, minus, off;", "mov.b32 magic, 0x43004300;"]
    if low == 8 or table:
        lines += [f"mov.b32 minus, {_bf16_pair(-1)};"]
    else:
        lines += [f"mov.b32 one, {_bf16_pair(1)};", f"mov.b32 off, {_bf16_pair(-128 - zero)};"]
    if low == 8:
        for k in range(2):
            byte = (2 * p + k) % 4
            lines += [f"prmt.b32 t, $2, $3, 0x{4 + byte}{4 + byte}{byte}{byte};", *_integers(f"${k}", "t")]
    elif len(table) == 16:
        lines += _table_lines(table)
        lines += [
            f"prmt.b32 v, $2, $3, 0x{4 + p}{4 + p}{4 + p}{p};",  # four nibbles: two of j, two of j + 1
            "and.b32 t, v, 0x7777;",
            "prmt.b32 a, t0, t1, t;",
            "prmt.b32 b, t2, t3, t;",
            "shr.u32 v, v, 1;",
            "lop3.b32 v, v, 0x4444, 0x3210, 0xEA;",  # chooses a or b by a nibble's top bit
            "prmt.b32 h, a, b, v;",
            *_integers("$0", "h"),
            "shr.u32 h, h, 8;",
            *_integers("$1", "h"),
        ]
    else:
        bit = 0
        lines += _table_lines(table)
        if low == 4:
            lines += [f"prmt.b32 t, $2, $3, 0x{4 + p}{4 + p}{p}{p};"]
        else:
            lines += ["prmt.b32 t, $2, $3, 0x5410;"]
            bit = 4 * p
        if high:
            lines += ["prmt.b32 h, $4, $5, 0x5410;"]
        for k in range(2):
            start = "0" if table else "magic"
            lines += [_shift("v", "t", -bit - low * k), f"mov.b32 a, {start};", _insert("a", "v", (1 << low) - 1)]
            if high:
                at = high * (2 * p + k)
                lines += [_shift("v", "h", low - at), _insert("a", "v", ((1 << high) - 1) << low)]
            if table:  # eight entries: the two codes choose bytes 0 and 2
                lines += ["shr.u32 v, a, 8;", "lop3.b32 a, v, 0x700, a, 0xEA;", "prmt.b32 v, t0, t1, a;"]
                lines += _integers(f"${k}", "v")
            else:
                lines += [f"fma.rn.bf16x2 ${k}, a, one, off;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _table_value(code, FMT: tl.constexpr):
    value = tl.zeros(code.shape, tl.float32)
    for n in tl.static_range(len(FMT[4])):
        value = tl.where(code == n, FMT[4][n] * 1.0, value)
    return value


@triton.jit
def code_pair(w, h, P: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Tiles 2P and 2P + 1, [BN, 32] each: code - zero, or the table's number.

    w, h int32 [BN, 32]: elements of the low and high plane (8-bit types: of half P // 2).
    """
    LOW: tl.constexpr = FMT[0]
    HIGH: tl.constexpr = FMT[1]
    if PTX:
        text: tl.constexpr = pair_text(FMT, P)
        if HIGH > 0:
            return tl.inline_asm_elementwise(
                text, "=r,=r,r,r,r,r", [w, h], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                text, "=r,=r,r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
    else:
        I: tl.constexpr = 2 * P
        if LOW == 8:
            a = (w << (24 - 8 * (I % 4))) >> 24
            b = (w << (16 - 8 * (I % 4))) >> 24
            return a.to(tl.float32), b.to(tl.float32)
        else:
            a = (w >> (LOW * I)) & ((1 << LOW) - 1)
            b = (w >> (LOW * (I + 1))) & ((1 << LOW) - 1)
            if HIGH > 0:
                a = a | (((h >> (HIGH * I)) & ((1 << HIGH) - 1)) << LOW)
                b = b | (((h >> (HIGH * (I + 1))) & ((1 << HIGH) - 1)) << LOW)
            if len(FMT[4]) > 0:
                return _table_value(a, FMT), _table_value(b, FMT)
            else:
                return (a - FMT[2]).to(tl.float32), (b - FMT[2]).to(tl.float32)


@triton.constexpr_function
def scaled_text(has_min: bool, fine: bool) -> str:
    """PTX on two weights: $0 = $1 * scale ($2) + rest of the minimum ($6); $4 is what bf16 cut off the scale."""
    lines = ["mov.b32 z, 0x80008000;"]
    rest = "$6" if has_min else "z"
    if fine:
        lines.append(f"fma.rn.bf16x2 z, $1, $4, {rest};")
        rest = "z"
    return "{ .reg .b32 z; " + " ".join(lines) + f" fma.rn.bf16x2 $0, $1, $2, {rest}; }}"


@triton.jit
def scaled(t, s, r, c, FMT: tl.constexpr, HAS_MIN: tl.constexpr, PTX: tl.constexpr):
    """t * s + c on a tile [BN, 32]; s, r (its remainder), c broadcast to it: fp32, or two equal bf16 in an int32."""
    if PTX:
        text: tl.constexpr = scaled_text(HAS_MIN, FMT[6])
        s = tl.broadcast_to(s, t.shape)
        r = tl.broadcast_to(r, t.shape) if FMT[6] else s  # operands the text does not name are not to be computed
        c = tl.broadcast_to(c, t.shape) if HAS_MIN else s
        return tl.inline_asm_elementwise(
            text, "=r,r,r,r,r,r,r,r", [t, s, r, c], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return t * s + c


@triton.jit
def load_codes(low, high, sb, n, N, FMT: tl.constexpr):
    """int32 [BN, 32] elements of a super-block: low plane (first and second half of 8-bit types) and high plane.

    low, high: pointers of one expert's planes; sb super-block; n int32 [BN] rows, all below N.
    """
    j = tl.arange(0, 32)
    row = tl.cast(N, tl.int64) * sb
    if FMT[0] == 8:
        a = tl.load(low + row * 64 + (n[:, None] * 64 + j[None, :]))
        b = tl.load(low + row * 64 + (n[:, None] * 64 + 32 + j[None, :]))
    else:
        a = tl.load(low + row * 32 + (n[:, None] * 32 + j[None, :])).to(tl.int32)
        b = a
    h = a
    if FMT[1] > 0:
        h = tl.load(high + row * 32 + (n[:, None] * 32 + j[None, :])).to(tl.int32)
    return a, b, h


@triton.jit
def load_super(low, high, words, halves, sb, n, N, FMT: tl.constexpr):
    """Codes and scales of a super-block of rows n, for ``weight_pair``; nothing for dense types."""
    if FMT[3] == DENSE:
        return (n,), (n,)
    else:
        return load_codes(low, high, sb, n, N, FMT), load_scales(words, halves, sb, n, N, FMT)


@triton.jit
def weight_pair(state, low, halves, sb, n, N, P: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Weights of tiles 2P and 2P + 1, [BN, 32] each: bf16, or fp32 without assembly."""
    KIND: tl.constexpr = FMT[3]
    HAS_MIN: tl.constexpr = KIND == K4 or KIND == K2 or KIND == BLOCK_MIN
    if KIND == DENSE:
        at = low + tl.cast(N, tl.int64) * sb * 256 + (n[:, None] * 256 + 64 * P + tl.arange(0, 32)[None, :])
        a = tl.load(at)
        b = tl.load(at + 32)
        if PTX:
            return a, b
        else:
            return a.to(tl.float32), b.to(tl.float32)
    else:
        codes, scales = state
        w = codes[1] if FMT[0] == 8 and P >= 2 else codes[0]
        a, b = code_pair(w, codes[2], P, FMT, PTX)
        s, r, c = tile_scale(scales, halves, sb, n, N, 2 * P, FMT, PTX)
        a = scaled(a, s, r, c, FMT, HAS_MIN, PTX)
        s, r, c = tile_scale(scales, halves, sb, n, N, 2 * P + 1, FMT, PTX)
        return a, scaled(b, s, r, c, FMT, HAS_MIN, PTX)
