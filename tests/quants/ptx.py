"""Runs the handful of PTX instructions that unpack weights, so that their text is tested without a GPU."""

from __future__ import annotations

import re
import struct

WORD = 0xFFFFFFFF


def to_float(word: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", word))[0])


def from_float(value: float) -> int:
    """Nearest fp32."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def bf16_pair(word: int) -> list[float]:
    """The two bf16 of a register, low half first."""
    return [to_float((word & 0xFFFF) << 16), to_float(word & 0xFFFF0000)]


def to_pair(values: list[float]) -> int:
    low, high = (from_float(v) for v in values)
    assert not (low | high) & 0xFFFF, "this sum is meant to be exact in bf16"
    return low >> 16 | high


def _permute(a: int, b: int, selector: int) -> int:
    data = (a | b << 32).to_bytes(8, "little")
    out = 0
    for k in range(4):
        choice = selector >> (4 * k) & 15
        byte = data[choice & 7]
        if choice & 8:
            byte = 0xFF if byte & 0x80 else 0
        out |= byte << (8 * k)
    return out


def _logic(a: int, b: int, c: int, table: int) -> int:
    out = 0
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out & WORD


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after a block of PTX; ``inputs`` are its operands, ``$2`` and so on."""
    registers = dict(inputs)

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0) & WORD

    for line in re.split(r"[;\n{}]+", text):
        parts = line.split(None, 1)
        if not parts or parts[0] == ".reg":
            continue
        target, *operands = (o.strip() for o in parts[1].split(","))
        a, b, c, d = ([value(o) for o in operands] + [0] * 4)[:4]
        match parts[0]:
            case "mov.b32":
                out = a
            case "and.b32":
                out = a & b
            case "shl.b32":
                out = a << b & WORD
            case "shr.u32":
                out = a >> b
            case "prmt.b32":
                out = _permute(a, b, c)
            case "lop3.b32":
                out = _logic(a, b, c, d)
            case "fma.rn.bf16x2":
                out = to_pair([x * y + z for x, y, z in zip(bf16_pair(a), bf16_pair(b), bf16_pair(c), strict=True)])
            case "fma.rn.f32":
                out = from_float(to_float(a) * to_float(b) + to_float(c))  # exact in double for our operands
            case other:
                raise AssertionError(f"unknown instruction {other}")
        registers[target] = out
    return registers
