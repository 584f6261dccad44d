"""Memory of a program that is run from its PTX: what is given, and what its warps share."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_arithmetic import Array

SHARED = 1 << 24  # where shared memory begins
GIVEN = 1 << 32  # where what is given begins, with as large a step


class Memory:
    """Words by address, and who touched shared ones since when."""

    def __init__(self, given: list[Array], warps: Array, shared_bytes: int) -> None:
        self.given = [array.reshape(-1).view(np.uint32) for array in given]
        self.warps = warps  # of each thread
        words = shared_bytes // 4
        self.shared = np.random.default_rng(0).integers(0, 1 << 32, words, dtype=np.uint32)
        # Warps that touched a word since the last barrier: -1 none, -2 several.
        self.touched = {kind: np.full(words, -1) for kind in ("write", "read", "atomic")}

    def find(self, address: Array, active: Array, kind: str) -> tuple[Array, Array]:
        """The array and the index in it of each active thread's address, which is touched in this way."""
        at = address[active].astype(np.int64)
        assert (at % 4 == 0).all()
        if at[0] >= GIVEN:
            which = at // GIVEN
            assert (which == which[0]).all()
            array, index = self.given[which[0] - 1], at % GIVEN // 4
            assert (index < len(array)).all(), f"outside of parameter {which[0]}"
            return array, index
        index = (at - SHARED) // 4
        assert ((index >= 0) & (index < len(self.shared))).all(), "outside of shared memory"
        self.touch(kind, index, self.warps[active])
        return self.shared, index

    def touch(self, kind: str, index: Array, warps: Array) -> None:
        """Note it, unless another warp could be in the way."""
        for other, touched in self.touched.items():
            if "write" in (kind, other) or kind != other:
                alone = (touched[index] == -1) | (touched[index] == warps)
                assert alone.all(), f"{kind} and {other} without a barrier between"
        before = self.touched[kind][index]
        self.touched[kind][index] = np.where((before == -1) | (before == warps), warps, -2)

    def meet(self) -> None:
        """A barrier of all threads."""
        for touched in self.touched.values():
            touched[:] = -1
