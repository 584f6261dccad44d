"""Launch parameters, chosen without trying: tile sizes and splits from the shapes and the GPU's size.

Measured on an H200 (docs/benchmarks/quants.md): several programs a multiprocessor, none under two super-blocks, and the
smallest token tile that holds nearly every expert's pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SMALL_SHARED = frozenset({(8, 6), (8, 9), (12, 0), (12, 1)})  # 99 KiB of shared memory a program, not 163 or 227
DENSE_TOKENS = 192  # from here on, weights are unpacked to bf16 once and multiplied by cuBLAS
SEARCH_PAIRS = 128  # up to here, programs find their expert's pairs themselves


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile BN × BM, parts of K, output tiles a program takes in turn, and Triton's warps and pipeline stages."""

    bn: int
    bm: int
    parts: int = 1
    tiles: int = 1
    warps: int = 4
    stages: int = 3

    @property
    def variant(self) -> tuple[int, ...]:
        """What a kernel is compiled for; parts and tiles are arguments."""
        return self.bn, self.bm, self.warps, self.stages


def _tile(rows: float, small_shared: bool) -> Launch:
    """The tile for so many tokens. Up to 16, warps work alone (mma.sync); four multiply larger tiles together."""
    if rows <= 8:
        return Launch(32, 8, warps=2)
    if rows <= 16:
        return Launch(64, 16, warps=2)
    return Launch(64, 32 if rows <= 32 else 64, stages=2 if small_shared else 3)


def _parts(programs: int, supers: int, processors: int, least: int) -> int:
    """Parts of K, a power of two: as many as leave ``least`` super-blocks to each and few programs waiting."""
    parts = 1
    while 2 * parts * least <= supers and 2 * parts * programs <= 10 * processors and parts < 8:
        parts *= 2
    return parts


def linear_launch(m: int, n: int, supers: int, processors: int, small_shared: bool = False) -> Launch:
    """For y[m, n] with ``supers`` super-blocks along K."""
    c = _tile(m, small_shared)
    programs = -(-m // c.bm) * -(-n // c.bn)
    return replace(c, parts=_parts(programs, supers, processors, 3 if programs > processors // 2 else 2))


def gate_up_launch(
    pairs: int, experts: int, n: int, supers: int, processors: int, small_shared: bool = False
) -> Launch:
    """For ``pairs`` (token, expert) pairs over ``experts`` experts of ``n`` hidden units on this rank."""
    c = _tile(2 * pairs / experts, small_shared)
    if pairs > SEARCH_PAIRS:
        return c
    return replace(c, parts=_parts(min(pairs, experts) * -(-n // c.bn), supers, processors, 3))


def down_launch(pairs: int, experts: int, n: int, supers: int, processors: int, small_shared: bool = False) -> Launch:
    """For the second product of the same pairs: ``n`` outputs, ``supers`` super-blocks of hidden units."""
    c = _tile(2 * pairs / experts, small_shared)
    programs = min(pairs, experts) * -(-n // c.bn)
    return replace(c, tiles=max(1, min(8, programs // (6 * processors))))
