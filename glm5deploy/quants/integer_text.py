"""PTX of integer_tile.py: two codes and their scales to two fp16 numbers."""

from __future__ import annotations

from typing import Any

import triton

from glm5deploy.quants.formats import Scales


@triton.constexpr_function
def insert(target: str, source: str, mask: int, rest: str) -> str:
    """target = (source & mask in both halves) | rest."""
    return f"lop3.b32 {target}, {source}, 0x{mask:04X}{mask:04X}, {rest}, 0xEA;"


@triton.constexpr_function
def code_lines(fmt: tuple[Any, ...], i: int) -> list[str]:
    """a = 1024 + code of tile i, or 1024 + 16 code of odd tiles: from the planes' elements $1 and, if any, $2."""
    low, high = fmt[:2]
    up = 4 * (i % 2)
    lines, at = [], "$1"
    if i % (16 // low) >= 2:
        lines.append("shr.u32 v, $1, 8;")
        at = "v"
    lines.append(insert("a", at, 0xF << up, "0x64006400"))
    if high:
        right = high * (i % (16 // high)) - 4 - up
        at = "v" if right else "$2"
        if right:
            lines.append(f"shr.u32 v, $2, {right};" if right > 0 else f"shl.b32 v, $2, {-right};")
        lines.append(insert("a", at, ((1 << high) - 1) << (4 + up), "a"))
    return lines


@triton.constexpr_function
def tile_text(fmt: tuple[Any, ...], i: int) -> str:
    """PTX for two weights of tile i ($0). Behind the planes' elements, twice each: scales, and for K4 -1024 times them.

    A register has the scales of two groups; the assembler makes the choice a part of the instruction that multiplies.
    """
    high, kind = fmt[1], fmt[3]
    first = 3 if high else 2
    group = i // 2 if kind == int(Scales.K4) else i
    half = "h" if group % 2 else "l"
    lines = [".reg .b32 a, v, c, s, z;", ".reg .b16 l, h;", *code_lines(fmt, i)]
    lines += [f"mov.b32 {{l, h}}, ${first};", f"mov.b32 s, {{{half}, {half}}};"]
    if kind == int(Scales.K4):
        lines += [f"mov.b32 {{l, h}}, ${first + 2};", f"mov.b32 z, {{{half}, {half}}};", "fma.rn.f16x2 $0, a, s, z;"]
    else:
        less = 0xE600E600 if i % 2 else 0xE420E420  # -(1024 + 16 * 32), -(1024 + 32)
        lines += [f"mov.b32 c, 0x{less:08X};", "add.rn.f16x2 a, a, c;", "mul.rn.f16x2 $0, a, s;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def pair_text(upper: bool, fmt: tuple[Any, ...]) -> str:
    """PTX: two bytes of the word, the last operand, on top of 1024 and then as scales ($0); for K4 -1024 times them."""
    byte = 2 * int(upper)
    lines = [".reg .b32 t, p, q;"]
    take = f"0x64, 0x4{byte + 1}4{byte};"
    if fmt[3] == int(Scales.K4):
        lines += [f"prmt.b32 t, $2, {take}", "mov.b32 p, 0xE400E400;"]
        lines += ["add.rn.f16x2 $0, t, p;", "mul.rn.f16x2 $1, $0, p;"]
    else:  # (t - 1024 - 128) / 16
        lines += [f"prmt.b32 t, $1, {take}", "mov.b32 p, 0x2C002C00;", "mov.b32 q, 0xD480D480;"]
        lines += ["fma.rn.f16x2 $0, t, p, q;"]
    return "{\n" + "\n".join(lines) + "\n}"
