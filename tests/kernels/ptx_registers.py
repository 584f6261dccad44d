"""Registers of all threads of a program that is run from its PTX."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_arithmetic import TYPES, Array

NOTHING = 0x7FFF7FFF7FFF7FFF  # what a register holds that nothing was put into: NaN, as fp16 too


class Registers:
    """Of `threads` threads, by name; and what names stand for that nothing is put into."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.everyone = np.ones(threads, bool)
        self.forget({})

    def forget(self, known: dict[str, Array]) -> None:
        """Begin anew with these names known."""
        self.regs: dict[str, Array] = {}
        self.known = known

    def value(self, operand: str, kind: str) -> Array:
        """An operand in every thread."""
        word = self.regs.get(operand)
        if word is None:
            if operand not in self.known:
                self.known[operand] = np.full(self.threads, number_of(operand) & (1 << 64) - 1, np.uint64)
            word = self.known[operand]
        if kind == "pred":
            return word.astype(bool)
        dtype = np.dtype(TYPES[kind])
        if word.dtype == bool or word.itemsize != dtype.itemsize:
            word = word.astype(f"u{dtype.itemsize}")
        return word.view(dtype)

    def put(self, operand: str, values: Array, active: Array) -> None:
        """Values of every thread into the active ones' register."""
        bits = values if values.dtype == bool else np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
        if active is not self.everyone:
            old = self.regs.get(operand, np.full(self.threads, NOTHING, np.uint64))
            bits = np.where(active, bits, old.astype(bits.dtype))
        self.regs[operand] = bits

    def put_some(self, operand: str, values: Array, active: Array) -> None:
        """Values of the active threads alone."""
        whole = np.zeros(self.threads, values.dtype)
        whole[active] = values
        self.put(operand, whole, active)

    def address(self, operand: str) -> Array:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.value(base.strip(), "u64") + np.uint64(int(offset or 0) & (1 << 64) - 1)


def number_of(operand: str) -> int:
    """A literal; registers that nothing was put into hold NaN."""
    if operand.startswith("%") or "@" in operand:
        return NOTHING
    return int(operand[2:], 16) if operand.startswith(("0f", "0F")) else int(operand.rstrip("U"), 0)
