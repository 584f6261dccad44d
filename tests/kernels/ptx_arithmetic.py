"""What PTX instructions compute, in every thread at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Value = Callable[[str, str], Array]  # an operand as a type
INTEGER = {"u16": np.uint16, "b16": np.uint16, "u32": np.uint32, "b32": np.uint32, "u64": np.uint64, "b64": np.uint64}
TYPES = INTEGER | {"s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32, "f16": np.float16}
TYPES |= {"b8": np.uint8, "u8": np.uint8, "s8": np.int8}
PAIRS: dict[str, tuple[str, Any]] = {
    "f16x2": ("u32", np.float16),
    "s16x2": ("u32", np.int16),
    "f32x2": ("u64", np.float32),
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neu": np.not_equal,
}
LOGICAL = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.fmin,
    "max": np.fmax,
}
UNARY: dict[str, Callable[[Array], Array]] = {
    "mov": lambda a: a,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "ex2": np.exp2,
}


def compute(o: Sequence[str], operands: Sequence[str], value: Value) -> Array:
    """The result of operation `o`, its name and types, in every thread; `value` gives an operand as a type.

    What overflows or divides by zero is for the caller to ignore.
    """
    kind = o[-1]
    if kind == "pred":
        a, *b = (value(x, "pred") for x in operands)
        return a if o[0] == "mov" else ~a if o[0] == "not" else LOGICAL[o[0]](a, b[0])
    if o[0] == "selp":
        return np.where(value(operands[2], "pred"), *(value(x, kind) for x in operands[:2]))
    if o[0] == "cvt":
        return _converted(o, operands, value)
    if o[0] in ("prmt", "lop3"):
        words = [value(x, "u32") for x in operands]
        return permuted(*words) if o[0] == "prmt" else chosen(*words)
    if kind in PAIRS:
        whole, part = PAIRS[kind]
        return _rounded(o[0], *(value(x, whole).view(part) for x in operands)).view(TYPES[whole])
    if kind == "f16":
        return _rounded(o[0], *(value(x, kind) for x in operands))
    a, *more = (value(x, "u32" if o[0] in ("shl", "shr") and i else kind) for i, x in enumerate(operands))
    match o[0]:
        case "setp":
            return COMPARE[o[1]](a, more[0])
        case "shl" | "shr":
            bits = a.dtype.itemsize * 8
            by = np.minimum(more[0], bits - 1).astype(a.dtype)
            moved = a << by if o[0] == "shl" else a >> by
            over = a >> (bits - 1) if o[0] == "shr" and kind[0] == "s" else np.zeros_like(a)
            return np.where(more[0] >= bits, over, moved)
        case "popc":
            return np.array([int(x).bit_count() for x in a], np.uint32)
        case "bfe":
            bits = a.dtype.itemsize * 8
            start, size = (value(x, "u32").astype(a.dtype) for x in operands[1:])
            assert ((start + size <= bits) & (size > 0)).all()
            return a << (bits - start - size) >> (bits - size)
        case "fma":
            total = (a.astype(np.float64) * more[0] + more[1]).astype(np.float32)
            return np.fmin(np.fmax(total, np.float32(0)), np.float32(1)) if "sat" in o else total
        case "div" if kind[0] in "su":
            wide, by = a.astype(np.int64), more[0].astype(np.int64)
            return (np.abs(wide) // np.maximum(np.abs(by), 1) * np.sign(wide) * np.sign(by)).astype(a.dtype)
        case "div":
            return a / more[0]
        case "mul" if o[1] == "hi":
            return ((a.astype(np.int64 if kind[0] == "s" else np.uint64) * more[0]) >> 32).astype(a.dtype)
        case "mad" | "mul" if o[1] == "wide":
            wide = np.int64 if kind[0] == "s" else np.uint64
            product = a.astype(wide) * more[0].astype(wide)
            return product + value(operands[2], kind[0] + "64") if o[0] == "mad" else product
        case "mad":
            return a * more[0] + more[1]
        case name:
            return BINARY[name](a, more[0]) if more else UNARY[name](a)


def _rounded(name: str, a: Array, *more: Array) -> Array:
    """Computed in more bits. fp16 is rounded once: fp64 holds every sum and product of fp16 that has to be rounded."""
    wide = np.int64 if a.dtype == np.int16 else np.float64
    if name == "fma":
        return (a.astype(wide) * more[0] + more[1]).astype(a.dtype)
    return (BINARY[name](a.astype(wide), more[0].astype(wide)) if more else UNARY[name](a)).astype(a.dtype)


def _converted(o: Sequence[str], operands: Sequence[str], value: Value) -> Array:
    """cvt. Of NaN and of what is too large only instructions come whose results nothing uses."""
    to, kind = o[-2:]
    if to.endswith("x2"):
        high, low = (_converted((to.removesuffix("x2"), kind), (x,), value) for x in operands)
        return low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)
    if to == "bf16":
        return rounded(value(operands[0], kind))
    if kind == "bf16":
        a = (value(operands[0], "u16").astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        a = value(operands[0], kind)
    return a.astype(TYPES[to])


def rounded(numbers: Array) -> Array:
    """fp32 to the bits of the nearest bf16, uint16."""
    bits = numbers.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)) >> np.uint32(16)
    return np.where(np.isnan(numbers), 0x7FFF, nearest).astype(np.uint16)


def permuted(a: Array, b: Array, names: Array) -> Array:
    """prmt: four of the eight bytes of a and b, each named by four bits; the fourth spreads the byte's sign."""
    both = a | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(0, 32, 8):
        name = names >> np.uint32(place // 2)
        byte = both >> ((name & np.uint32(7)) * np.uint32(8)).astype(np.uint64) & np.uint64(0xFF)
        byte = np.where(name & np.uint32(8), (byte >> np.uint64(7)) * np.uint64(0xFF), byte)
        result |= byte.astype(np.uint32) << np.uint32(place)
    return result


def chosen(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: bit 4 a + 2 b + c of a table, for every bit of three registers."""
    result = np.zeros_like(a)
    for row in range(8):
        if table[0] >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result
