"""Memory of a program that is run from its PTX: what is given, and what its warps share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.ptx_arithmetic import Array

SHARED = 1 << 24  # where shared memory begins
GIVEN = 1 << 32  # where what is given begins, with as large a step
UNIT = 2  # bytes of shared memory that are watched together
COMING = -2  # whose a unit is: of a copy that nobody has waited for


@dataclass(slots=True)
class Copy:
    """What one instruction copies: threads, the group that each adds it to, bytes of shared memory, new bytes."""

    threads: Array
    groups: Array
    places: Array
    data: Array


class Memory:
    """Bytes by address, and who touched shared ones since when."""

    def __init__(self, given: list[Array], warps: Array, shared_bytes: int) -> None:
        assert all(array.flags.c_contiguous for array in given)
        self.given = [array.reshape(-1).view(np.uint8) for array in given]
        self.warps = warps  # of each thread
        self.shared = np.random.default_rng(0).integers(0, 256, shared_bytes, dtype=np.uint8)
        units = -(-shared_bytes // UNIT)
        # Warps that touched a unit since the last barrier: -1 none, -2 several.
        self.touched = {kind: np.full(units, -1) for kind in ("write", "read", "atomic")}
        # Threads that waited for a copy that others must not see before a barrier: -1 none.
        self.owner = np.full(units, -1)
        self.copies: list[Copy] = []
        self.groups = np.zeros(len(warps), np.int64)  # that each thread has committed

    def find(self, address: Array, size: int, active: Array, kind: str) -> tuple[Array, Array]:
        """The bytes that hold each active thread's address and, [threads, size], where: touched in this way."""
        at = address[active].astype(np.int64)
        assert not (at % size).any(), f"{size} bytes that are not aligned"
        span = np.arange(size)
        if at[0] >= GIVEN:
            which = at // GIVEN
            assert (which == which[0]).all()
            array, index = self.given[which[0] - 1], at % GIVEN
            assert (index + size <= len(array)).all(), f"outside of parameter {which[0]}"
            return array, index[:, None] + span
        index = at - SHARED
        assert ((index >= 0) & (index + size <= len(self.shared))).all(), "outside of shared memory"
        self.touch(kind, (index[:, None] + span[::UNIT]) // UNIT, np.flatnonzero(active))
        return self.shared, index[:, None] + span

    def read(self, address: Array, size: int, active: Array) -> Array:
        """Bytes [active threads, size]."""
        array, index = self.find(address, size, active, "read")
        return array[index]

    def write(self, address: Array, data: Array, active: Array) -> None:
        """Store bytes [active threads, size]."""
        array, index = self.find(address, data.shape[1], active, "write")
        array[index] = data

    def add(self, address: Array, numbers: Array, active: Array) -> Array:
        """Add to words one thread after the other; what was there before each."""
        array, index = self.find(address, 4, active, "atomic")
        words = array[: len(array) // 4 * 4].view(numbers.dtype)
        before = np.zeros_like(numbers)
        for thread, (word, number) in enumerate(zip(index[:, 0] // 4, numbers, strict=True)):
            before[thread] = words[word]
            words[word] += number
        return before

    def touch(self, kind: str, units: Array, threads: Array) -> None:
        """Note it for units [threads, any], unless another warp or a copy could be in the way."""
        owner = self.owner[units]
        assert (owner != COMING).all(), f"{kind} where a copy may still come: it was not waited for"
        assert ((owner == -1) | (owner == threads[:, None])).all(), f"{kind} of another thread's copy before a barrier"
        warps = np.broadcast_to(self.warps[threads][:, None], units.shape)
        for other, touched in self.touched.items():
            if "write" in (kind, other) or kind != other:
                alone = (touched[units] == -1) | (touched[units] == warps)
                assert alone.all(), f"{kind} and {other} without a barrier between"
        touched = self.touched[kind]
        before = touched[units]
        touched[units] = np.where((before == -1) | (before == warps), warps, -2)
        several = units[touched[units] != warps]  # also in this very instruction
        touched[several] = -2

    def copy(self, to: Array, source: Array, counts: Array, size: int, active: Array) -> None:
        """Begin to copy ``counts`` bytes of `size`, the others are zero, from what is given to shared memory."""
        threads = np.flatnonzero(active)
        _, places = self.find(to, size, active, "write")
        self.owner[places[:, ::UNIT] // UNIT] = COMING
        self.shared[places] = 0xFF
        data = np.zeros((len(threads), size), np.uint8)
        for count in set(counts[active].tolist()) - {0}:
            some = active & (counts == count)
            assert not (source[some].astype(np.int64) % size).any(), "a copy's source that is not aligned"
            data[some[active], :count] = self.read(source, count, some)
        self.copies.append(Copy(threads, self.groups[threads], places, data))

    def commit(self, active: Array) -> None:
        """What active threads have begun to copy is a group."""
        self.groups[active] += 1

    def wait(self, left: int, active: Array) -> None:
        """All but the `left` latest groups of each active thread are there, for that thread."""
        for c in self.copies:
            done = active[c.threads] & (c.groups < self.groups[c.threads] - left)
            self.shared[c.places[done]] = c.data[done]
            self.owner[c.places[done][:, ::UNIT] // UNIT] = c.threads[done][:, None]
            c.threads, c.groups, c.places, c.data = (x[~done] for x in (c.threads, c.groups, c.places, c.data))
        self.copies = [c for c in self.copies if len(c.threads)]

    def meet(self) -> None:
        """A barrier of all threads."""
        for touched in self.touched.values():
            touched[:] = -1
        self.owner[self.owner >= 0] = -1

    def meet_in_warps(self, active: Array) -> None:
        """A barrier of each active thread's warp: its threads see each other's copies."""
        own = (self.owner >= 0) & active[self.owner]
        self.touched["write"][own] = self.warps[self.owner[own]]
        self.owner[own] = -1
