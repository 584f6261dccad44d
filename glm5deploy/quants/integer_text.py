"""PTX of integer_tile.py: two codes and their scales to two fp16 numbers."""

from __future__ import annotations

from typing import Any

import triton

from glm5deploy.quants.formats import Scales
from glm5deploy.quants.scales import group_tiles, has_minimum, scale_bias, scale_place
from glm5deploy.quants.unpack import insert, look_up_sixteen, pair_selector, shifted, table_lines


@triton.constexpr_function
def shrink(fmt: tuple[Any, ...]) -> float:
    """What the tensor cores' weights are of scale times code: Q6_K's would leave fp16's range, nibbles have a half."""
    kind = fmt[3]
    return 1 / 16 if kind == int(Scales.K6) else 2.0 if kind in (int(Scales.NIBBLE), int(Scales.NIBBLE16)) else 1.0


@triton.constexpr_function
def _scale_line(fmt: tuple[Any, ...]) -> tuple[float, float]:
    """A scale from its byte on top of 1024: times the first, less the second."""
    kind = fmt[3]
    if kind in (int(Scales.NIBBLE), int(Scales.NIBBLE16)):
        return 2.0, 2047.0  # n + 1/2, twice
    return shrink(fmt), shrink(fmt) * (1024.0 + scale_bias(kind))


@triton.constexpr_function
def interleaved(fmt: tuple[Any, ...]) -> bool:
    """Whether even and odd groups' scale bytes are in words of their own."""
    return scale_place(fmt[3], 0)[0] != scale_place(fmt[3], 1)[0]


@triton.constexpr_function
def tile_group(fmt: tuple[Any, ...], i: int) -> int:
    """The group of scales that tile i belongs to."""
    return i // group_tiles(fmt[3])


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
def code_lines(fmt: tuple[Any, ...], i: int) -> list[str]:
    """a = 1024 + 2^lifted * code of tile i, from the planes' elements $1 and, if there is a high one, $2."""
    low, high = fmt[:2]
    up = lifted(fmt, i)
    lines, at = shifted("$1", 8 if i % (16 // low) >= 8 // low else 0)
    lines = [*lines, insert("a", at, ((1 << low) - 1) << up, "0x64006400")]
    if high:
        shift, at = shifted("$2", high * (i % (16 // high)) - low - up)
        lines += [*shift, insert("a", at, ((1 << high) - 1) << (low + up), "a")]
    return lines


@triton.constexpr_function
def value_lines(fmt: tuple[Any, ...], i: int) -> list[str]:
    """a = the table's entry for tile i's code, 16 times as much where i is odd, as codes without a table are lifted."""
    low, high, table = fmt[0], fmt[1], fmt[4]
    lines = table_lines(table, 128)
    if len(table) == 16:
        lines += [*look_up_sixteen("$1"), f"prmt.b32 v, p, q, 0x{pair_selector(i % 4):04X};"]
    else:  # a code of three bits
        shift, at = shifted("$1", low * (i % (16 // low)))
        lines += [*shift, f"and.b32 p, {at}, 0x00030003;"]
        shift, at = shifted("$2", high * (i % (16 // high)) - low)
        lines += [*shift, insert("p", at, 4, "p"), "shr.u32 v, p, 8;", "lop3.b32 p, v, 0x700, p, 0xEA;"]
        lines.append("prmt.b32 v, t0, t1, p;")
    lines.append(insert("a", "v", 0xFF, "0x64006400"))
    if i % 2:
        lines += [f"mov.b32 c, {_halves(16.0, 16.0)};", f"mov.b32 z, {_halves(-18432.0, -18432.0)};"]
        return [*lines, "fma.rn.f16x2 a, a, c, z;"]
    return [*lines, f"mov.b32 c, {_halves(-1152.0, -1152.0)};", "add.rn.f16x2 a, a, c;"]


@triton.constexpr_function
def tile_text(fmt: tuple[Any, ...], i: int) -> str:
    """PTX for two weights of tile i ($0). After the planes' elements, each twice: scales and, with minima, -1024 each.

    A register has the scales of two groups; the assembler makes the choice a part of the instruction that multiplies.
    """
    first = 3 if fmt[1] else 2
    half = "h" if tile_group(fmt, i) % 2 else "l"
    lines = [".reg .b32 a, b, c, p, q, s, t, v, z, t0, t1, t2, t3;", ".reg .b16 l, h;"]
    lines += value_lines(fmt, i) if fmt[4] else code_lines(fmt, i)
    lines += [f"mov.b32 {{l, h}}, ${first};", f"mov.b32 s, {{{half}, {half}}};"]
    if has_minimum(fmt[3]):
        lines += [f"mov.b32 {{l, h}}, ${first + 2};", f"mov.b32 z, {{{half}, {half}}};", "fma.rn.f16x2 $0, a, s, z;"]
    else:
        if not fmt[4]:
            less = -1024.0 - fmt[2] * 2.0 ** lifted(fmt, i)
            lines += [f"mov.b32 c, {_halves(less, less)};", "add.rn.f16x2 a, a, c;"]
        lines.append("mul.rn.f16x2 $0, a, s;")
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _factor(fmt: tuple[Any, ...], group: int) -> float:
    """What a group's scale is multiplied by besides, so that lifted codes times activations are all of one size."""
    if fmt[4]:
        return 1.0
    tile = group_tiles(fmt[3]) * group
    return (16.0 if tile % 2 else 1.0) / 2.0 ** lifted(fmt, tile)


@triton.constexpr_function
def pair_text(fmt: tuple[Any, ...], group: int) -> str:
    """PTX: the scales of groups ``group``, an even one, and the next ($0), from the last operands, their word or two.

    With minima also -1024 times as much ($1). A byte is put on top of 1024 and taken off it again.
    """
    lines = [".reg .b32 t, p, q;"]
    byte = scale_place(fmt[3], group)[1]
    if interleaved(fmt):
        lines += [f"prmt.b32 t, $1, $2, 0x{pair_selector(byte):04X};", insert("t", "t", 0xFF, "0x64006400")]
    else:
        lines.append(f"prmt.b32 t, {'$2' if has_minimum(fmt[3]) else '$1'}, 0x64, 0x4{byte + 1}4{byte};")
    times, less = _scale_line(fmt)
    factors = _factor(fmt, group), _factor(fmt, group + 1)
    lines.append(f"mov.b32 q, {_halves(-less * factors[0], -less * factors[1])};")
    if (times, *factors) == (1.0, 1.0, 1.0):
        lines.append("add.rn.f16x2 $0, t, q;")
    else:
        lines += [f"mov.b32 p, {_halves(times * factors[0], times * factors[1])};", "fma.rn.f16x2 $0, t, p, q;"]
    if has_minimum(fmt[3]):
        lines += ["mov.b32 q, 0xE400E400;", "mul.rn.f16x2 $1, $0, q;"]
    return "{\n" + "\n".join(lines) + "\n}"
