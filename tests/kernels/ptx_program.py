"""Runs a program of a compiled kernel from its PTX, and finds what a GPU would not forgive.

Raised as AssertionError: memory outside the given tensors or the shared memory that the kernel asks for, shared memory
that two warps touch between two barriers when one of them writes, copies to shared memory that are touched before they
were waited for or that others read before a barrier, and barriers or exchanges that some thread never comes to. Only
the instructions that the tested kernels use are known. Registers that nothing was put into hold NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.kernels.ptx_arithmetic import Array
from tests.kernels.ptx_memory import GIVEN, SHARED, Memory
from tests.kernels.ptx_text import parse
from tests.kernels.ptx_threads import Threads


class Program(Threads):
    """A kernel's text, ready to run with `threads` threads and `shared` bytes that they share."""

    def __init__(self, text: str, threads: int, shared: int) -> None:
        super().__init__(threads)
        self.code, self.labels = parse(text)
        self.shared = shared

    def run(self, place: Sequence[int], parameters: Sequence[int | Array], grid: Sequence[int] = ()) -> None:
        """The program at a place in the grid. Parameters are numbers, or arrays that stand for pointers to them."""
        same = {"global_smem": SHARED}
        same |= {f"%ctaid.{axis}": number for axis, number in zip("xyz", place, strict=False)}
        same |= {f"%nctaid.{axis}": number for axis, number in zip("xyz", grid, strict=False)}
        known = {name: np.full(self.threads, number, np.uint64) for name, number in same.items()}
        self.forget(known | {"%tid.x": np.arange(self.threads, dtype=np.uint64)})
        given = [p for p in parameters if isinstance(p, np.ndarray)]
        addresses = iter(range(GIVEN, GIVEN * (len(given) + 1), GIVEN))
        self.parameters = [next(addresses) if isinstance(p, np.ndarray) else p for p in parameters]
        self.memory = Memory(given, self.warp, self.shared)
        self.waiting = np.zeros(self.threads, bool)
        self.pc = np.zeros(self.threads, np.int64)
        self.place = 0  # of all threads; -1 where they are in several
        with np.errstate(all="ignore"):
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
            self.execute(instruction.name, instruction.operands, active)
        if self.place >= 0 and not goes:
            self.place += 1
            return
        self.pc[mask] = here + 1
        if goes:
            self.pc[active] = self.labels[instruction.operands[0]] if instruction.operands else len(self.code)
        self.place = int(self.pc[0]) if (self.pc == self.pc[0]).all() and not self.waiting.any() else -1
