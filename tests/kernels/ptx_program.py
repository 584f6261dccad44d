"""Runs one program of a compiled kernel from its PTX, all threads in lockstep, and finds what a GPU would not forgive.

Raised as AssertionError: memory outside the given tensors, shared memory that two warps touch between two barriers
when one of them writes, and exchanges within a warp that some lane does not take part in. Only the instructions that
the selection kernels use are known.
"""

from __future__ import annotations

import re

import numpy as np

from tests.kernels.ptx_arithmetic import TYPES, Array, compute

SHARED = 1 << 24  # where shared memory begins for this program


class Program:
    """A kernel's text, ready to run with `threads` threads."""

    def __init__(self, text: str, threads: int) -> None:
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
        self.executed = 0  # warp instructions

    def run(self, program_id: int, parameters: list[int | Array]) -> None:
        """Parameters are numbers, or int32 arrays that stand for pointers to them."""
        self.regs: dict[str, Array] = {}
        self.lane = np.arange(self.threads) % 32
        self.warp = np.arange(self.threads) // 32
        self.special = {"%tid.x": np.arange(self.threads), "%ctaid.x": np.full(self.threads, program_id)}
        self.memory = [p for p in parameters if isinstance(p, np.ndarray)]
        addresses = iter(range(1 << 32, 1 << 40, 1 << 32))
        self.parameters = [next(addresses) if isinstance(p, np.ndarray) else p for p in parameters]
        self.shared = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
        self.touched: dict[str, Array] = {k: np.full(1 << 16, -1) for k in ("write", "read", "atomic")}
        pc = np.zeros(self.threads, np.int64)
        waiting = np.zeros(self.threads, bool)
        while len(self.code) > (here := int(np.where(waiting, len(self.code), pc).min())) or waiting.any():
            assert here < len(self.code), "threads wait for others that never come"
            mask = pc == here
            guard, operation, operands = self.code[here]
            if operation.startswith(("bar", "shfl", "redux", "ldmatrix")):
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
            number = int(operand[2:], 16) if operand.startswith(("0f", "0F")) else int(operand, 0)
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

    def words(self, address: Array, active: Array) -> tuple[Array, Array]:
        """The array and the index in it of each active thread's address."""
        at = address[active].astype(np.int64)
        assert (at % 4 == 0).all()
        if at[0] < 1 << 32:
            index = (at - SHARED) // 4
            assert ((index >= 0) & (index < len(self.shared))).all()
            return self.shared, index
        which = at >> 32
        assert (which == which[0]).all()
        array = self.memory[which[0] - 1].reshape(-1).view(np.uint32)
        index = (at & 0xFFFFFFFF) // 4
        assert (index < len(array)).all(), f"outside of parameter {which[0]}"
        return array, index

    def touch(self, kind: str, index: Array, active: Array) -> None:
        warps = self.warp[active]
        for other in ("write", "read", "atomic"):
            if "write" in (kind, other) or (kind != other):
                seen = self.touched[other][index]
                assert ((seen == -1) | (seen == warps)).all(), f"{kind} and {other} without a barrier between"
        before = self.touched[kind][index]
        self.touched[kind][index] = np.where((before == -1) | (before == warps), warps, -2)

    def move(self, store: bool, size: int, operands: list[str], active: Array) -> None:
        registers, place = (operands[1], operands[0]) if store else (operands[0], operands[1])
        address = self.address(place)
        for register in re.findall(r"[^{},\s]+", registers):
            old = self.value(register, "u64") if store else np.zeros(self.threads, np.uint64)
            for shift in range(0, 8 * size, 32):
                array, index = self.words(address, active)
                if array is self.shared:
                    self.touch("write" if store else "read", index, active)
                if store:
                    array[index] = (old[active] >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)
                else:
                    old[active] |= array[index].astype(np.uint64) << np.uint64(shift)
                address = address + np.uint64(4)
            if not store:
                self.put(register, old, active)

    def exchange(self, o: list[str], operands: list[str], active: Array) -> Array:
        """shfl and redux over whole warps."""
        values = self.value(operands[1], "s32")
        rows = values.reshape(-1, 32)
        if o[0] == "redux":
            reduced = {"add": rows.sum(1, dtype=np.int32), "max": rows.max(1), "min": rows.min(1)}[o[2]]
            return np.repeat(reduced, 32).astype(np.int32)
        by = self.value(operands[2], "s32")
        up = np.where(self.lane >= by, self.lane - by, self.lane)
        source = {"bfly": self.lane ^ by, "up": up, "idx": by & 31}[o[2]]
        return values[self.warp * 32 + source]

    def step(self, o: list[str], operands: list[str], active: Array) -> None:
        kind = o[-1]
        match o[0]:
            case "bar":
                for array in self.touched.values():
                    array[:] = -1
                return
            case "ld" if o[1] == "param":
                number = self.parameters[int(operands[1].strip("[]").rpartition("_")[2])]
                self.put(operands[0], np.full(self.threads, number & (1 << 64) - 1, np.uint64), active)
                return
            case "ld" | "st":
                self.move(o[0] == "st", TYPES[kind]().itemsize, operands, active)
                return
            case "mov" if "{" in "".join(operands):
                self.pack(operands, active)
                return
            case "atom":
                array, index = self.words(self.address(operands[1]), active)
                self.touch("atomic", index, active)
                np.add.at(array, index, self.value(operands[2], "u32")[active])
                return
            case "ldmatrix":  # one 8 x 8 matrix of 16 bits: a lane gets four bytes of row lane / 4
                array, index = self.words(self.address(operands[1]), active)
                first = np.zeros(self.threads, np.int64)
                first[active] = index
                index = first[self.warp * 32 + self.lane // 4] + self.lane % 4
                self.touch("read", index[active], active)
                self.put(operands[0].strip("{} "), array[index], active)
                return
            case "shfl" | "redux":
                self.put(operands[0].split("|")[0], self.exchange(o, operands, active), active)
                return
            case _:
                pass
        self.put(operands[0], compute(o, operands[1:], self.value), active)

    def pack(self, operands: list[str], active: Array) -> None:
        """A 64-bit register from two of 32, or into them."""
        parts = re.findall(r"[^{},\s]+", operands["{" in operands[1]])
        if "{" in operands[1]:
            low, high = (self.value(x, "u64") & np.uint64(0xFFFFFFFF) for x in parts)
            self.put(operands[0], low | high << np.uint64(32), active)
            return
        whole = self.value(operands[1], "u64")
        for part, shift in zip(parts, (0, 32), strict=True):
            self.put(part, (whole >> np.uint64(shift)) & np.uint64(0xFFFFFFFF), active)
