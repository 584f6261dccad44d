"""From planes to bf16 tiles in registers: the device code that all products share.

A super-block is multiplied as sixteen tiles [BN, 16]. Its planes' elements have 16 bits, so a 32-bit register holds the
elements of two neighbouring columns, and one instruction takes a code out of both: a code is put into a bf16's mantissa
(0x4300 | q is 128 + q). Tiles therefore hold 128 + code; ``excess`` says what is too much, and products take it off
through the sums of the activations (product.py). Codes of eight bits and codes that name a table's entry become exact
signed integers at once. Where the activations are no bf16 (interpreter, tests) the same numbers are made in fp32.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505, RUF005
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from glm5deploy.quants.scales import DENSE


@triton.constexpr_function
def excess(fmt: tuple[Any, ...]) -> int:
    """What a tile's numbers are larger by than the codes that scales multiply."""
    low, _, offset, _, table, _ = fmt
    return 0 if low >= 8 or table else 128 + offset


@triton.constexpr_function
def insert(target: str, source: str, mask: int, rest: str) -> str:
    """target = (source & mask in both halves) | rest."""
    return f"lop3.b32 {target}, {source}, 0x{mask:04X}{mask:04X}, {rest}, 0xEA;"


@triton.constexpr_function
def shifted(source: str, right: int) -> tuple[list[str], str]:
    """Instructions that shift a register, and where the result is."""
    if right == 0:
        return [], source
    return [f"shr.u32 v, {source}, {right};" if right > 0 else f"shl.b32 v, {source}, {-right};"], "v"


@triton.constexpr_function
def _integers(out: str, source: str) -> list[str]:
    """Signed bytes in the low half of each 16 bits to bf16: (128 + low seven bits) - (128 or, if negative, 256)."""
    return [
        insert("a", source, 0x7F, "magic"),
        insert("b", source, 0x80, "magic"),
        f"fma.rn.bf16x2 {out}, b, minus, a;",
    ]


@triton.constexpr_function
def table_lines(table: tuple[int, ...], added: int = 0) -> list[str]:
    """Registers t0 to t3: a table's bytes, each with ``added`` to it."""
    packed = [sum((table[4 * k + n] + added & 0xFF) << (8 * n) for n in range(4)) for k in range(len(table) // 4)]
    return [f"mov.b32 t{k}, 0x{value:08X};" for k, value in enumerate(packed)]


@triton.constexpr_function
def look_up_sixteen(source: str) -> list[str]:
    """Bytes that eight nibbles choose from a table of sixteen, t0 to t3: of one column in p, of the next in q.

    A nibble's top bit chooses between the table's halves. The assembler does what four tiles have in common only once.
    """
    lines = [f"and.b32 t, {source}, 0x77777777;", f"shr.u32 v, {source}, 1;"]
    lines += ["lop3.b32 v, v, 0x44444444, 0x32103210, 0xEA;"]
    lines += ["prmt.b32 a, t0, t1, t;", "prmt.b32 b, t2, t3, t;", "prmt.b32 p, a, b, v;"]
    lines += ["shr.u32 t, t, 16;", "shr.u32 v, v, 16;"]
    return [*lines, "prmt.b32 a, t0, t1, t;", "prmt.b32 b, t2, t3, t;", "prmt.b32 q, a, b, v;"]


@triton.constexpr_function
def pair_selector(k: int) -> int:
    """Selects byte k of two registers, twice each."""
    return 0x11 * k | (0x4400 + 0x1100 * k)


@triton.constexpr_function
def tile_text(fmt: tuple[Any, ...], i: int) -> str:
    """PTX for tile i ($0): from two elements of its part of the low plane ($1) and two of the high plane ($2)."""
    low, high, _, _, table, _ = fmt
    k = i % (16 // low)
    lines = [".reg .b32 a, b, p, q, t, v, t0, t1, t2, t3, magic, minus;"]
    lines += ["mov.b32 magic, 0x43004300;", "mov.b32 minus, 0xBF80BF80;", *table_lines(table)]
    shift, at = shifted("$1", low * k)
    if len(table) == 16:
        lines += [*look_up_sixteen("$1"), f"prmt.b32 v, p, q, 0x{pair_selector(k):04X};", *_integers("$0", "v")]
    elif low == 8:
        lines += [*shift, *_integers("$0", at)]
    else:
        lines += [*shift, insert("p", at, (1 << low) - 1, "0" if table else "magic")]
        if high:
            shift, at = shifted("$2", high * (i % (16 // high)) - low)
            lines += [*shift, insert("p", at, ((1 << high) - 1) << low, "p")]
        if table:  # eight entries: the two codes choose bytes 0 and 2
            lines += ["shr.u32 v, p, 8;", "lop3.b32 p, v, 0x700, p, 0xEA;", "prmt.b32 v, t0, t1, p;"]
            lines += _integers("$0", "v")
        else:
            lines += ["mov.b32 $0, p;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def _table_value(code, FMT: tl.constexpr):
    value = tl.zeros(code.shape, tl.float32)
    for n in tl.static_range(len(FMT[4])):
        value = tl.where(code == n, FMT[4][n] * 1.0, value)
    return value


@triton.jit
def code_tile(w, h, I: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Tile I [BN, 16] of a super-block: code + excess, or the table's number; bf16, or fp32 without assembly.

    w, h int16 [BN, 16]: the part of the low plane, and of the high one (w where there is none), that holds the tile.
    """
    LOW: tl.constexpr = FMT[0]
    HIGH: tl.constexpr = FMT[1]
    if PTX:  # one result each: layouts are chosen for one, and others would be moved through shared memory
        text: tl.constexpr = tile_text(FMT, I)
        if HIGH > 0:
            return tl.inline_asm_elementwise(text, "=r,r,r", [w, h], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(text, "=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        code = ((w.to(tl.int32) & 0xFFFF) >> (LOW * (I % (16 // LOW)))) & ((1 << LOW) - 1)
        if LOW == 8:
            return ((code << 24) >> 24).to(tl.float32)
        if HIGH > 0:
            more = ((h.to(tl.int32) & 0xFFFF) >> (HIGH * (I % (16 // HIGH)))) & ((1 << HIGH) - 1)
            code = code | (more << LOW)
        if len(FMT[4]) > 0:
            return _table_value(code, FMT)
        else:
            return (code + 128).to(tl.float32)


@triton.jit
def load_part(plane, sb, n, N, P: tl.constexpr, WIDTH: tl.constexpr):
    """Part P [BN, 16] of a super-block's WIDTH in a plane. sb counts super-blocks; n int32 [BN] rows, all below N."""
    start = plane + tl.cast(N, tl.int64) * 16 * sb * WIDTH
    at = n[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.load(start + N * 16 * P + at)


@triton.jit
def load_plane(plane, sb, n, N, WIDTH: tl.constexpr):
    """A super-block's WIDTH parts of a plane, as ``load_part`` has each."""
    parts = ()
    for p in tl.static_range(WIDTH):
        parts = parts + (load_part(plane, sb, n, N, p, WIDTH),)
    return parts


@triton.jit
def load_codes(low, high, sb, n, N, FMT: tl.constexpr):
    """All codes of a super-block of rows n, still packed: the parts of the low plane, then those of the high one."""
    parts = load_plane(low, sb, n, N, FMT[0])
    if FMT[1] > 0:
        parts = parts + load_plane(high, sb, n, N, FMT[1])
    return parts


@triton.jit
def part_tile(w, h, I: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Tile I [BN, 16] of the parts that hold it, as in ``code_tile``; weights themselves of dense types."""
    if FMT[3] == DENSE:
        return w if PTX else w.to(tl.float32)
    else:
        return code_tile(w, h, I, FMT, PTX)


@triton.jit
def weight_tile(codes, I: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """Tile I [BN, 16] of ``load_codes``' super-block, as in ``part_tile``."""
    PART: tl.constexpr = I * FMT[0] // 16
    if FMT[1] > 0:
        return part_tile(codes[PART], codes[FMT[0] + I * FMT[1] // 16], I, FMT, PTX)
    else:
        return part_tile(codes[PART], codes[PART], I, FMT, PTX)
