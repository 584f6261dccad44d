"""What PTX instructions compute, in every thread at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
INTEGER = {"u16": np.uint16, "b16": np.uint16, "u32": np.uint32, "b32": np.uint32, "u64": np.uint64, "b64": np.uint64}
TYPES = INTEGER | {"s16": np.int16, "s32": np.int32, "s64": np.int64, "f32": np.float32}
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


def compute(o: list[str], operands: list[str], value: Callable[[str, str], Array]) -> Array:
    """The result of operation `o`, its name and types, in every thread; `value` gives an operand as a type."""
    kind = o[-1]
    if kind == "pred":
        a, *b = (value(x, "u64").astype(bool) for x in operands)
        return a if o[0] == "mov" else ~a if o[0] == "not" else LOGICAL[o[0]](a, b[0])
    if o[0] == "selp":
        return np.where(value(operands[2], "u64").astype(bool), *(value(x, kind) for x in operands[:2]))
    if o[0] == "cvt":
        # Of NaN and of what is too large only instructions come whose results nothing uses.
        with np.errstate(invalid="ignore"):
            return value(operands[0], kind).astype(TYPES[o[-2]])
    if o[0] == "prmt":
        return permuted(*(value(x, "u32").astype(np.uint64) for x in operands))
    if kind == "s16x2":
        a, b = (value(x, "u32") for x in operands)
        high = (a >> np.uint32(16)) + (b >> np.uint32(16))
        return (a + b) & np.uint32(0xFFFF) | high << np.uint32(16)
    a, *more = (value(x, "u32" if o[0] in ("shl", "shr") and i else kind) for i, x in enumerate(operands))
    with np.errstate(all="ignore"):
        match o[0]:
            case "mov":
                return a
            case "setp":
                return COMPARE[o[1]](a, more[0])
            case "shl" | "shr":
                bits = a.dtype.itemsize * 8
                by = np.minimum(more[0], bits - 1).astype(a.dtype)
                moved = a << by if o[0] == "shl" else a >> by
                over = a >> (bits - 1) if o[0] == "shr" and kind[0] == "s" else np.zeros_like(a)
                return np.where(more[0] >= bits, over, moved)
            case "not":
                return ~a
            case "neg":
                return -a
            case "popc":
                return np.array([int(x).bit_count() for x in a], np.uint32)
            case "bfe":
                return (a >> more[0]) & ((np.uint32(1) << more[1]) - np.uint32(1))
            case "fma":
                total = (a.astype(np.float64) * more[0] + more[1]).astype(np.float32)
                return np.fmin(np.fmax(total, np.float32(0)), np.float32(1)) if "sat" in o else total
            case "div" if kind[0] in "su":
                wide, by = a.astype(np.int64), more[0].astype(np.int64)
                return (np.abs(wide) // np.maximum(np.abs(by), 1) * np.sign(wide) * np.sign(by)).astype(a.dtype)
            case "div":
                return a / more[0]
            case "sqrt":
                return np.sqrt(a)
            case "mul" if o[1] == "hi":
                return ((a.astype(np.int64 if kind[0] == "s" else np.uint64) * more[0]) >> 32).astype(a.dtype)
            case "mad" | "mul" if o[1] == "wide":
                wide = np.int64 if kind[0] == "s" else np.uint64
                product = a.astype(wide) * more[0].astype(wide)
                return product + value(operands[2], kind[0] + "64") if o[0] == "mad" else product
            case "mad":
                return a * more[0] + more[1]
            case name:
                return BINARY[name](a, more[0])


def permuted(a: Array, b: Array, chosen: Array) -> Array:
    """prmt: four of the eight bytes of a and b, each named by four bits."""
    both = a | b << np.uint64(32)
    result = np.zeros_like(both)
    for byte in range(0, 32, 8):
        place = (chosen >> np.uint64(byte // 2) & np.uint64(7)) * np.uint64(8)
        result |= (both >> place & np.uint64(0xFF)) << np.uint64(byte)
    return result.astype(np.uint32)
