"""Runs a program of a compiled kernel from its PTX, and finds what a GPU would not forgive.

Raised as AssertionError: memory outside the given tensors or the shared memory that the kernel asks for, shared memory
that two warps touch between two barriers when one of them writes, and barriers or exchanges that some thread never
comes to. Only the instructions that the
selection kernels use are known.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kernels.ptx_arithmetic import TYPES, Array, compute
from tests.kernels.ptx_memory import GIVEN, SHARED, Memory


class Program:
    """A kernel's text, ready to run with `threads` threads and `shared` bytes that they share."""

    def __init__(self, text: str, threads: int, shared: int) -> None:
        body = text[text.index("\n{") :]
        body = re.sub(r"//.*", "", body)
        self.labels: dict[str, int] = {}
        self.code: list[tuple[str, str, list[str]]] = []
        for line in re.split(r"[;\n]", re.sub(r"(?m)^\s*\{\s*$|^\s*\}\s*$", "", body)):
            line = line.strip().removeprefix("{").strip()
            if match := re.match(r"(\$\w+):$", line):
                self.labels[match[1]] = len(self.code)
            elif line and not line.startswith((".", "}")):
                guard, operation, rest = re.match(r"(?:@(!?%?\w+)\s+)?(\S+)\s*(.*)", line).groups()  # type: ignore[union-attr]
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
                self.code.append((guard or "", operation, operands))
        self.threads = threads
        self.shared = shared
        self.executed = 0  # warp instructions

    def run(self, program_id: int, parameters: list[int | Array], part: int = 0, parts: int = 1) -> None:
        """Parameters are numbers, or int32 arrays that stand for pointers to them; part is the grid's second index."""
        self.regs: dict[str, Array] = {}
        self.lane = np.arange(self.threads) % 32
        self.warp = np.arange(self.threads) // 32
        same = {"%ctaid.x": program_id, "%ctaid.y": part, "%nctaid.y": parts}
        self.special = {name: np.full(self.threads, number) for name, number in same.items()}
        self.special["%tid.x"] = np.arange(self.threads)
        given = [p for p in parameters if isinstance(p, np.ndarray)]
        addresses = iter(range(GIVEN, GIVEN * (len(given) + 1), GIVEN))
        self.parameters = [next(addresses) if isinstance(p, np.ndarray) else p for p in parameters]
        self.memory = Memory(given, self.warp, self.shared)
        pc = np.zeros(self.threads, np.int64)
        waiting = np.zeros(self.threads, bool)
        while len(self.code) > (here := int(np.where(waiting, len(self.code), pc).min())) or waiting.any():
            assert here < len(self.code), "threads wait for others that never come"
            mask = pc == here
            guard, operation, operands = self.code[here]
            if operation.startswith(("bar", "shfl", "redux", "ldmatrix", "stmatrix")):
                together = self.threads if operation.startswith("bar") else 32
                complete = np.repeat(mask.reshape(-1, together).all(1), together)
                waiting[mask] = ~complete[mask]
                if not complete.any():
                    continue
                mask = complete
            active = mask
            if guard:
                taken = self.regs[guard.lstrip("!")].astype(bool)
                active = mask & (~taken if guard.startswith("!") else taken)
            self.executed += int(mask.reshape(-1, 32).any(1).sum())
            pc[mask] += 1
            if operation == "ret":
                pc[active] = len(self.code)
            elif operation.startswith("bra"):
                pc[active] = self.labels[operands[0]]
            elif active.any():
                self.step(operation.split("."), operands, active)

    def value(self, operand: str, kind: str) -> Array:
        dtype = TYPES[kind]
        if operand.startswith(("%r", "%p", "%f")) or operand in self.regs:
            word = self.regs.get(operand, np.zeros(self.threads, np.uint64))
        elif operand in self.special:
            word = self.special[operand].astype(np.uint64)
        elif operand == "global_smem":
            word = np.full(self.threads, SHARED, np.uint64)
        else:
            number = int(operand[2:], 16) if operand.startswith(("0f", "0F")) else int(operand.rstrip("U"), 0)
            word = np.full(self.threads, number & (1 << 64) - 1, np.uint64)
        unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
        return word.astype(np.uint64).astype(unsigned).view(dtype)

    def put(self, operand: str, values: Array, active: Array) -> None:
        if values.dtype == bool:
            bits = values.astype(np.uint64)
        else:
            bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype(np.uint64)
        old = self.regs.get(operand, np.zeros(self.threads, np.uint64))
        self.regs[operand] = np.where(active, bits, old)

    def address(self, operand: str) -> Array:
        base, _, offset = operand.strip("[] ").partition("+")
        return self.value(base.strip(), "u64") + np.uint64(int(offset or 0))

    def move(self, store: bool, size: int, operands: list[str], active: Array) -> None:
        """ld and st of one or more registers of `size` bytes."""
        registers, place = (operands[1], operands[0]) if store else (operands[0], operands[1])
        address = self.address(place)
        for register in re.findall(r"[^{},\s]+", registers):
            value = self.value(register, "u64") if store else np.zeros(self.threads, np.uint64)
            for shift in range(0, 8 * size, 32):
                array, index = self.memory.find(address, active, "write" if store else "read")
                if store:
                    array[index] = (value[active] >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)
                else:
                    value[active] |= array[index].astype(np.uint64) << np.uint64(shift)
                address = address + np.uint64(4)
            if not store:
                self.put(register, value, active)

    def move_own(self, store: bool, size: int, operands: list[str], active: Array) -> None:
        """The same in a thread's own memory."""
        first = int(operands[not store].strip("[] ").partition("+")[2] or 0)
        if store:
            value = self.value(operands[1], "u64")
            for byte in range(size):
                self.own[active, first + byte] = (value[active] >> np.uint64(8 * byte)) & np.uint64(255)
            return
        parts = [self.own[:, first + byte].astype(np.uint64) << np.uint64(8 * byte) for byte in range(size)]
        self.put(operands[0], np.bitwise_or.reduce(parts), active)

    def move_matrix(self, store: bool, operands: list[str], active: Array) -> None:
        """ldmatrix and stmatrix of one 8 x 8 matrix of 16 bits: lane i gives row i's address, row i / 4 is its own."""
        rows = self.address(operands[not store])
        address = rows[self.warp * 32 + self.lane // 4] + (4 * (self.lane % 4)).astype(np.uint64)
        place = "[" + "%matrix" + "]"
        self.regs["%matrix"] = address
        register = operands[store].strip("{} ")
        self.move(store, 4, [place, register] if store else [register, place], active)

    def exchange(self, o: list[str], operands: list[str], active: Array) -> Array:
        """shfl and redux over whole warps."""
        values = self.value(operands[1], o[-1] if o[0] == "redux" else "s32")
        if o[0] == "redux":
            rows = values.reshape(-1, 32)
            reduced = {"add": rows.sum(1, dtype=rows.dtype), "max": rows.max(1), "min": rows.min(1)}[o[2]]
            return np.repeat(reduced, 32)
        by = self.value(operands[2], "s32")
        up = np.where(self.lane >= by, self.lane - by, self.lane)
        source = {"bfly": self.lane ^ by, "up": up, "idx": by & 31}[o[2]]
        return values[self.warp * 32 + source]

    def step(self, o: list[str], operands: list[str], active: Array) -> None:
        kind = o[-1]
        match o[0]:
            case "bar" | "barrier":
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
                move(o[0] == "st", TYPES[kind]().itemsize, operands, active)
            case "ldmatrix" | "stmatrix":
                self.move_matrix(o[0] == "stmatrix", operands, active)
            case "mov" if "{" in "".join(operands):
                self.pack(operands, 4 * TYPES[kind]().itemsize, active)
            case "red" | "atom":
                place, by = operands[-2:]
                array, index = self.memory.find(self.address(place), active, "atomic")
                # An `inc` up to the largest number of all adds one.
                np.add.at(array, index, np.uint32(1) if "inc" in o else self.value(by, "u32")[active])
            case "shfl" | "redux":
                value, _, inside = operands[0].partition("|")
                self.put(value, self.exchange(o, operands, active), active)
                if inside:
                    self.put(inside, self.lane >= self.value(operands[2], "s32"), active)
            case _:
                self.put(operands[0], compute(o, operands[1:], self.value), active)

    def pack(self, operands: list[str], half: int, active: Array) -> None:
        """A register from two of `half` its bits, the low one first, or into them."""
        mask, by = np.uint64((1 << half) - 1), np.uint64(half)
        parts = re.findall(r"[^{},\s]+", operands["{" in operands[1]])
        if "{" in operands[1]:
            low, high = (self.value(x, "u64") & mask for x in parts)
            self.put(operands[0], low | high << by, active)
            return
        whole = self.value(operands[1], "u64")
        for part, shift in zip(parts, (np.uint64(0), by), strict=True):
            self.put(part, (whole >> shift) & mask, active)
