"""What PTX instructions do to registers and memory, in all active threads at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels import ptx_matrix
from tests.kernels.ptx_arithmetic import TYPES, Array, compute
from tests.kernels.ptx_memory import Memory
from tests.kernels.ptx_registers import Registers
from tests.kernels.ptx_text import registers_of


class Threads(Registers):
    """Threads of a program with their memory, and the numbers and addresses it was called with."""

    memory: Memory
    parameters: list[int]

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.lane = np.arange(threads) % 32
        self.warp = np.arange(threads) // 32

    def move(self, store: bool, kind: str, operands: tuple[str, ...], active: Array) -> None:
        """ld and st of one or more registers."""
        place, names = self.address(operands[not store]), registers_of(operands[store])
        dtype = np.dtype(TYPES[kind])
        if store:
            data = np.stack([self.value(name, kind)[active] for name in names], 1)
            self.memory.write(place, data.view(np.uint8), active)
            return
        data = self.memory.read(place, len(names) * dtype.itemsize, active).view(dtype)
        for k, name in enumerate(names):
            self.put_some(name, data[:, k].astype(np.int64) if kind[0] == "s" else data[:, k], active)

    def move_own(self, store: bool, kind: str, operands: tuple[str, ...], active: Array) -> None:
        """The same in a thread's own memory."""
        first = int(operands[not store].strip("[] ").partition("+")[2] or 0)
        where = slice(first, first + np.dtype(TYPES[kind]).itemsize)
        if store:
            self.own[active, where] = self.value(operands[1], kind)[active, None].view(np.uint8)
        else:
            self.put(operands[0], np.ascontiguousarray(self.own[:, where]).view(TYPES[kind])[:, 0], active)

    def move_matrices(self, o: Sequence[str], operands: tuple[str, ...], active: Array) -> None:
        """ldmatrix and stmatrix: a warp's first lanes have the rows' addresses."""
        store = o[0] == "stmatrix"
        place, names = self.address(operands[not store]), registers_of(operands[store])
        rows = active & (self.lane < 8 * len(names))
        if store:
            data = [self.value(name, "u32")[active] for name in names]
            self.memory.write(place, ptx_matrix.rows_of_registers(data, "trans" in o), rows)
            return
        data = self.memory.read(place, ptx_matrix.ROW, rows)
        for name, found in zip(names, ptx_matrix.registers_of_rows(data, len(names), "trans" in o), strict=True):
            self.put_some(name, found, active)

    def multiply(self, o: Sequence[str], operands: tuple[str, ...], active: Array) -> None:
        assert o[3:] == ("m16n8k16", "row", "col", "f32", "f16", "f16", "f32")
        d, a, b, c = (registers_of(x) for x in operands)
        words = [[self.value(name, "u32")[active] for name in names] for names in (a, b)]
        total = ptx_matrix.multiply(*words, [self.value(name, "f32")[active] for name in c])
        for name, found in zip(d, total, strict=True):
            self.put_some(name, found, active)

    def exchange(self, o: Sequence[str], operands: tuple[str, ...], active: Array) -> None:
        """shfl and redux over whole warps."""
        name, _, inside = operands[0].partition("|")
        values = self.value(operands[1], o[-1] if o[0] == "redux" else "s32")
        if o[0] == "redux":
            rows = values.reshape(-1, 32)
            reduced = {"add": rows.sum(1, dtype=rows.dtype), "max": rows.max(1), "min": rows.min(1)}[o[2]]
            self.put(name, np.repeat(reduced, 32), active)
            return
        by = self.value(operands[2], "s32")
        source = {"bfly": self.lane ^ by, "up": self.lane - by, "down": self.lane + by, "idx": by & 31}[o[2]]
        there = (source >= 0) & (source < 32)
        self.put(name, values[self.warp * 32 + np.where(there, source, self.lane)], active)
        if inside:
            self.put(inside, there, active)

    def copy(self, o: Sequence[str], operands: tuple[str, ...], active: Array) -> None:
        """cp.async."""
        match o[2]:
            case "commit_group":
                self.memory.commit(active)
            case "wait_group":
                self.memory.wait(int(operands[0], 0), active)
            case _:
                to, source = (self.address(x) for x in operands[:2])
                counts = self.value(operands[3], "u32")
                self.memory.copy(to, source, counts, int(operands[2], 0), active)

    def execute(self, o: Sequence[str], operands: tuple[str, ...], active: Array) -> None:
        kind = o[-1]
        match o[0]:
            case "bar" | "barrier" if o[1] == "warp":
                self.memory.meet_in_warps(active)
            case "bar" | "barrier":
                assert operands == ("0",), "a barrier of some warps"
                self.memory.meet()
            case "ld" if o[1] == "param":
                number = self.parameters[int(operands[1].strip("[]").rpartition("_")[2])]
                self.put(operands[0], np.full(self.threads, number & (1 << 64) - 1, np.uint64), active)
            case "cvta" | "griddepcontrol":  # kernels are run one after the other
                pass
            case "mov" if "local_depot" in operands[1]:
                self.own = np.zeros((self.threads, 64), np.uint8)
            case "ld" | "st":
                move = self.move_own if "%SP" in "".join(operands) else self.move
                move(o[0] == "st", kind, operands, active)
            case "ldmatrix" | "stmatrix":
                self.move_matrices(o, operands, active)
            case "mma":
                self.multiply(o, operands, active)
            case "cp":
                self.copy(o, operands, active)
            case "mov" if "{" in "".join(operands):
                self.pack(operands, np.dtype(TYPES[kind]), active)
            case "red" | "atom":
                place, by = operands[-2:]
                # An `inc` up to the largest number of all adds one.
                numbers = np.ones(self.threads, np.uint32) if "inc" in o else self.value(by, kind)
                before = self.memory.add(self.address(place), numbers[active], active)
                if o[0] == "atom":
                    self.put_some(operands[0], before, active)
            case "shfl" | "redux":
                self.exchange(o, operands, active)
            case _:
                self.put(operands[0], compute(o, operands[1:], self.value), active)

    def pack(self, operands: tuple[str, ...], whole: np.dtype, active: Array) -> None:
        """A register from two of half its bits, the low one first, or into them."""
        half = f"b{4 * whole.itemsize}"
        if "{" in operands[1]:
            parts = [self.value(x, half) for x in registers_of(operands[1])]
            self.put(operands[0], np.stack(parts, 1).view(whole)[:, 0], active)
            return
        parts = self.value(operands[1], f"b{8 * whole.itemsize}").view(TYPES[half]).reshape(-1, 2).T
        for name, part in zip(registers_of(operands[0]), parts, strict=True):
            self.put(name, part, active)
