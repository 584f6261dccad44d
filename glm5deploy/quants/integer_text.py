"""PTX of integer_tile.py: two codes and their scales to two fp16 numbers."""

from __future__ import annotations

from typing import Any

import triton

from glm5deploy.quants.formats import Scales


@triton.constexpr_function
def has_minima(fmt: tuple[Any, ...]) -> bool:
    """Whether weights are scale * code less a minimum; else scale * (code - offset)."""
    return fmt[3] in (int(Scales.K4), int(Scales.K2))


@triton.constexpr_function
def shrink(fmt: tuple[Any, ...]) -> float:
    """What a super-block's sum is of what its scales and codes say: Q6_K's would leave fp16's range."""
    return 1 / 16 if fmt[3] == int(Scales.K6) else 1.0


@triton.constexpr_function
def _bias(fmt: tuple[Any, ...]) -> int:
    """What scale bytes are too large by."""
    return 128 if fmt[3] == int(Scales.K6) else 32 if fmt[3] == int(Scales.K3) else 0


@triton.constexpr_function
def tile_group(fmt: tuple[Any, ...], i: int) -> int:
    """The group of scales that tile i belongs to: one of 32 weights or, but for Q4_K and Q5_K, of 16."""
    return i // 2 if fmt[3] == int(Scales.K4) else i


@triton.constexpr_function
def lifted(fmt: tuple[Any, ...], i: int) -> int:
    """Bits that tile i's code lies above a mantissa's lowest, once the upper byte has been moved down."""
    low = fmt[0]
    return low * (i % (8 // low))


@triton.constexpr_function
def _half(value: float) -> int:
    """The bits of a number that fp16 holds exactly, no zero."""
    size, exponent = abs(value), 15
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    return (32768 if value < 0 else 0) + exponent * 1024 + int((size - 1) * 1024)


@triton.constexpr_function
def _halves(low: float, high: float) -> str:
    """Two fp16 numbers in a register."""
    return f"0x{_half(high) * 65536 + _half(low):08X}"


@triton.constexpr_function
def insert(target: str, source: str, mask: int, rest: str) -> str:
    """target = (source & mask in both halves) | rest."""
    return f"lop3.b32 {target}, {source}, 0x{mask:04X}{mask:04X}, {rest}, 0xEA;"


@triton.constexpr_function
def code_lines(fmt: tuple[Any, ...], i: int) -> list[str]:
    """a = 1024 + 2^lifted * code of tile i, from the planes' elements $1 and, if there is a high one, $2."""
    low, high = fmt[:2]
    up = lifted(fmt, i)
    lines, at = [], "$1"
    if i % (16 // low) >= 8 // low:
        lines.append("shr.u32 v, $1, 8;")
        at = "v"
    lines.append(insert("a", at, ((1 << low) - 1) << up, "0x64006400"))
    if high:
        right = high * (i % (16 // high)) - low - up
        at = "v" if right else "$2"
        if right:
            lines.append(f"shr.u32 v, $2, {right};" if right > 0 else f"shl.b32 v, $2, {-right};")
        lines.append(insert("a", at, ((1 << high) - 1) << (low + up), "a"))
    return lines


@triton.constexpr_function
def tile_text(fmt: tuple[Any, ...], i: int) -> str:
    """PTX for two weights of tile i ($0). After the planes' elements, each twice: scales and, with minima, -1024 each.

    A register has the scales of two groups; the assembler makes the choice a part of the instruction that multiplies.
    """
    first = 3 if fmt[1] else 2
    half = "h" if tile_group(fmt, i) % 2 else "l"
    lines = [".reg .b32 a, v, c, s, z;", ".reg .b16 l, h;", *code_lines(fmt, i)]
    lines += [f"mov.b32 {{l, h}}, ${first};", f"mov.b32 s, {{{half}, {half}}};"]
    if has_minima(fmt):
        lines += [f"mov.b32 {{l, h}}, ${first + 2};", f"mov.b32 z, {{{half}, {half}}};", "fma.rn.f16x2 $0, a, s, z;"]
    else:
        less = -1024.0 - fmt[2] * 2.0 ** lifted(fmt, i)
        lines += [f"mov.b32 c, {_halves(less, less)};", "add.rn.f16x2 a, a, c;", "mul.rn.f16x2 $0, a, s;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _factor(fmt: tuple[Any, ...], group: int) -> float:
    """What a group's scale is multiplied by, so that its tiles' lifted codes times activations are all of one size."""
    tile = 2 * group if fmt[3] == int(Scales.K4) else group
    return shrink(fmt) * (16.0 if tile % 2 else 1.0) / 2.0 ** lifted(fmt, tile)


@triton.constexpr_function
def pair_text(fmt: tuple[Any, ...], group: int) -> str:
    """PTX: the scales of groups ``group``, an even one, and the next ($0), from their word, the last operand.

    With minima also -1024 times as much ($1). A byte is put on top of 1024 and taken off it again.
    """
    byte = group % 4
    word = "$2" if has_minima(fmt) else "$1"
    factors = _factor(fmt, group), _factor(fmt, group + 1)
    less = [-(1024.0 + _bias(fmt)) * f for f in factors]
    lines = [".reg .b32 t, p, q;", f"prmt.b32 t, {word}, 0x64, 0x4{byte + 1}4{byte};", f"mov.b32 q, {_halves(*less)};"]
    if factors == (1.0, 1.0):
        lines.append("add.rn.f16x2 $0, t, q;")
    else:
        lines += [f"mov.b32 p, {_halves(*factors)};", "fma.rn.f16x2 $0, t, p, q;"]
    if has_minima(fmt):
        lines += ["mov.b32 q, 0xE400E400;", "mul.rn.f16x2 $1, $0, q;"]
    return "{\n" + "\n".join(lines) + "\n}"
