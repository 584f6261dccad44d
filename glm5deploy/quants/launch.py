"""Launch parameters, chosen without trying: tile sizes and splits from the shapes and the GPU's size.

The choices are reckoned, not measured (docs/benchmarks/quants.md): about two programs a multiprocessor, none under two
super-blocks, and the smallest token tile that holds most experts' pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def _tokens_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


def _parts(programs: int, supers: int, processors: int, most: int) -> int:
    """Parts of K that bring a launch to about two programs a multiprocessor, none under two super-blocks."""
    wanted = max(1, round(2 * processors / max(programs, 1)))
    return max(1, min(wanted, most, supers // 2))


def linear_launch(m: int, n: int, supers: int, processors: int, small_shared: bool = False) -> Launch:
    """For y[m, n] with ``supers`` super-blocks along K."""
    bm = _tokens_tile(m)
    programs = -(-m // bm) * -(-n // 64)
    stages = 2 if small_shared and bm > 16 else 3
    return Launch(64, bm, _parts(programs, supers, processors, 16), stages=stages)


def gate_up_launch(
    pairs: int, experts: int, n: int, supers: int, processors: int, small_shared: bool = False
) -> Launch:
    """For ``pairs`` (token, expert) pairs over ``experts`` experts of ``n`` hidden units on this rank."""
    mean = pairs / experts
    bm = 16 if mean <= 10 else 32 if mean <= 24 else 64
    active = min(pairs, experts)
    parts = _parts(active * -(-n // 64), supers, processors, 8) if pairs <= SEARCH_PAIRS else 1
    stages = 2 if small_shared or bm > 32 else 3
    return Launch(64, bm, parts, stages=stages)


def down_launch(pairs: int, experts: int, n: int, supers: int, processors: int, small_shared: bool = False) -> Launch:
    """For the second product of the same pairs: ``n`` outputs, ``supers`` super-blocks of hidden units."""
    mean = pairs / experts
    bm = 16 if mean <= 10 else 32 if mean <= 24 else 64
    spans = -(-n // 64)
    programs = min(pairs, experts) * spans
    tiles = max(1, min(8, programs // (4 * processors)))
    stages = 2 if small_shared and bm > 16 else 3
    return Launch(64, bm, tiles=tiles, stages=stages)
