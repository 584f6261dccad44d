"""Memory of a cluster of programs that are run from their PTX: what is given, shared and a thread's own."""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_arithmetic import Array

SHARED = 1 << 24  # where a program's shared memory begins for itself
CLUSTER = 1 << 25  # and for the others of its cluster, with a step of 2^20
WORDS = 1 << 16  # of it
GIVEN = 1 << 32  # where what is given begins, with as large a step


class Memory:
    """Words by address, and who touched shared ones since when."""

    def __init__(self, given: list[Array], ranks: Array, warps: Array) -> None:
        self.given = [array.reshape(-1).view(np.uint32) for array in given]
        self.ranks, self.warps = ranks, warps  # of each thread: its program's place in the cluster, its warp
        size = (int(ranks.max()) + 1) * WORDS
        self.shared = np.random.default_rng(0).integers(0, 1 << 32, size, dtype=np.uint32)
        # Warps that touched a word since the last barrier: -1 none, -2 several.
        self.touched = {kind: np.full(size, -1) for kind in ("write", "read", "atomic")}
        # Since the cluster met: written by its program, read by another one.
        self.written, self.lent = np.zeros(size, bool), np.zeros(size, bool)

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
        own, others = self.ranks[active], at >= CLUSTER
        rank = np.where(others, (at - CLUSTER) >> 20, own)
        index = np.where(others, (at - CLUSTER) & 0xFFFFF, at - SHARED) // 4
        assert ((index >= 0) & (index < WORDS)).all()
        index += rank * WORDS
        self.touch(kind, index, self.warps[active], rank != own)
        return self.shared, index

    def touch(self, kind: str, index: Array, warps: Array, far: Array) -> None:
        """Note it, unless another warp could be in the way."""
        assert kind == "read" or not far.any()
        assert not self.written[index[far]].any(), "read before the cluster has met"
        self.lent[index[far]] = True
        index, warps = index[~far], warps[~far]
        if kind != "read":
            assert not self.lent[index].any(), "written while the cluster may read"
            self.written[index] = True
        for other, touched in self.touched.items():
            if "write" in (kind, other) or kind != other:
                alone = (touched[index] == -1) | (touched[index] == warps)
                assert alone.all(), f"{kind} and {other} without a barrier between"
        before = self.touched[kind][index]
        self.touched[kind][index] = np.where((before == -1) | (before == warps), warps, -2)

    def meet(self, active: Array, cluster: bool) -> None:
        """A barrier of these threads' programs, or of the whole cluster."""
        for rank in np.unique(self.ranks[active]):
            for touched in self.touched.values():
                touched[rank * WORDS : (rank + 1) * WORDS] = -1
        if cluster:
            self.written[:] = self.lent[:] = False
