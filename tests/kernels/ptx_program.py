"""Runs a program of a compiled kernel from its PTX, and finds what a GPU would not forgive.

Raised as AssertionError: memory outside the given tensors or the shared memory that the kernel asks for, shared memory
that two warps touch between two barriers when one of them writes, copies to shared memory that are touched before they
were waited for or that others read before a barrier, and barriers or exchanges that some thread never comes to. Only
the instructions that the tested kernels use are known. Registers that nothing was put into hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels import ptx_matrix
from tests.kernels.ptx_arithmetic import TYPES, Array, compute
from tests.kernels.ptx_memory import GIVEN, SHARED, Memory
from tests.kernels.ptx_text import parse, registers_of

NOTHING = 0x7FFF7FFF7FFF7FFF


class Program:
    """A kernel's text, ready to run with `threads` threads and `shared` bytes that they share."""

    def __init__(self, text: str, threads: int, shared: int) -> None:
        self.code, self.labels = parse(text)
        self.threads = threads
        self.shared = shared
        self.lane = np.arange(threads) % 32
        self.warp = np.arange(threads) // 32
        self.everyone = np.ones(threads, bool)

    def run(self, place: Sequence[int], parameters: Sequence[int | Array], grid: Sequence[int] = ()) -> None:
        """The program at a place in the grid. Parameters are numbers, or arrays that stand for pointers to them."""
        self.regs: dict[str, Array] = {}
        same = {"global_smem": SHARED}
        same |= {f"%ctaid.{axis}": number for axis, number in zip("xyz", place, strict=False)}
        same |= {f"%nctaid.{axis}": number for axis, number in zip("xyz", grid, strict=False)}
        self.known = {name: np.full(self.threads, number, np.uint64) for name, number in same.items()}
        self.known["%tid.x"] = np.arange(self.threads, dtype=np.uint64)
        given = [p for p in parameters if isinstance(p, np.ndarray)]
        addresses = iter(range(GIVEN, GIVEN * (len(given) + 1), GIVEN))
        self.parameters = [next(addresses) if isinstance(p, np.ndarray) else p for p in parameters]
        self.memory = Memory(given, self.warp, self.shared)
        self.waiting = np.zeros(self.threads, bool)
        self.pc = np.zeros(self.threads, np.int64)
        self.place = 0  # of all threads; -1 where they are in several
        while self.place != len(self.code):
            self.step()

    def step(self) -> None:
        """One instruction, of the threads that are furthest behind."""
        here, mask = self.place, self.everyone
        if here < 0:
            here = int(np.where(self.waiting, len(self.code), self.pc).min())
            assert here < len(self.code), "threads wait for others that never come"
            mask = self.pc == here
            if self.code[here].meeting != 1:
                together = self.code[here].meeting or self.threads
                complete = np.repeat(mask.reshape(-1, together).all(1), together)
                self.waiting[mask] = ~complete[mask]
                mask = complete
        instruction = self.code[here]
        active = mask
        if instruction.guard:
            active = mask & (self.value(instruction.guard, "pred") ^ instruction.unless)
        goes = instruction.name[0] in ("bra", "ret")
        if not goes and active.any():
            self.execute(list(instruction.name), instruction.operands, active)
        if self.place >= 0 and not goes:
            self.place += 1
            return
        self.pc[mask] = here + 1
        if goes:
            self.pc[active] = self.labels[instruction.operands[0]] if instruction.operands else len(self.code)
        self.place = int(self.pc[0]) if (self.pc == self.pc[0]).all() and not self.waiting.any() else -1

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

    def move_matrices(self, o: list[str], operands: tuple[str, ...], active: Array) -> None:
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

    def multiply(self, o: list[str], operands: tuple[str, ...], active: Array) -> None:
        assert o[3:] == ["m16n8k16", "row", "col", "f32", "f16", "f16", "f32"]
        d, a, b, c = (registers_of(x) for x in operands)
        words = [[self.value(name, "u32")[active] for name in names] for names in (a, b)]
        total = ptx_matrix.multiply(*words, [self.value(name, "f32")[active] for name in c])
        for name, found in zip(d, total, strict=True):
            self.put_some(name, found, active)

    def exchange(self, o: list[str], operands: tuple[str, ...], active: Array) -> None:
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

    def copy(self, o: list[str], operands: tuple[str, ...], active: Array) -> None:
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

    def execute(self, o: list[str], operands: tuple[str, ...], active: Array) -> None:
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


def number_of(operand: str) -> int:
    """A literal; registers that nothing was put into hold NaN."""
    if operand.startswith("%") or "@" in operand:
        return NOTHING
    return int(operand[2:], 16) if operand.startswith(("0f", "0F")) else int(operand.rstrip("U"), 0)
