"""Launch parameters, chosen without trying: tile sizes and splits from the shapes and the GPU's size.

The numbers come from sweeps on an H200 (docs/benchmarks/quants.md). One super-block of a tile is a *step*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TOGETHER = frozenset({9, 10})  # major compute capabilities whose four warps multiply a tile together (wgmma, tcgen05)
DENSE_TOKENS = 65  # from here on, weights are unpacked to bf16 once and multiplied by cuBLAS
SEARCH_PAIRS = 128  # up to here, programs find their expert's pairs themselves; a power of two
# Two choices that no GPU has timed yet (docs/benchmarks/quants.md, "Not measured yet"); the table takes them when true.
ACROSS = False  # one token's products spread K over the warps of a program (across_kernel.py)
# Launches begin before the ones ahead have ended (early.py), on GPUs of compute capability 9 and more; the table takes
# its value as this module is imported.
EARLY = False
ACROSS_ROWS = 16  # outputs of a program of across_kernel.py: what the tensor cores take at a time
# KiB of shared memory that a program may have, by compute capability; elsewhere the last
SHARED = {(8, 0): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED = 99
PART_STEPS = 0.75  # what adding up the parts of one more program on every multiprocessor costs


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile BN × BM, parts of K, output tiles a program takes in turn, and Triton's warps and pipeline stages.

    ``resident``: programs that a multiprocessor holds at a time, about. ``across``: super-blocks that the kernels of
    across_kernel.py take at a time, as many as warps; 0 stands for the other kernels. ``early``: see early.py.
    """

    bn: int
    bm: int
    parts: int = 1
    tiles: int = 1
    warps: int = 4
    stages: int = 3
    resident: int = 4
    across: int = 0
    early: bool = EARLY

    @property
    def variant(self) -> tuple[int, ...]:
        """What a kernel is compiled for; parts and tiles are arguments."""
        return self.bn, self.bm, self.warps, self.stages, self.across, self.early


FEW_WIDE = Launch(64, 8, warps=2)
FEW_ALONE = Launch(32, 8, warps=1, resident=12)  # a warp to itself: best where programs are many
FEW_SPREAD = Launch(32, 8, warps=2, resident=8)  # best where they are few
SOME = Launch(64, 16, warps=2)
SOME_ALONE = Launch(32, 16, warps=1, resident=8)
MANY = Launch(64, 32, resident=3)


def _parts(c: Launch, programs: int, supers: int, processors: int) -> int:
    """Parts of K after which the last program ends soonest, the adding of parts included."""

    def steps(parts: int) -> float:
        waves = -(-programs * parts // (processors * c.resident))
        return waves * -(-supers // parts) + PART_STEPS * programs * parts / processors

    return min(range(1, min(8, supers) + 1), key=steps)


def linear_launch(m: int, n: int, supers: int, processors: int, together: bool = True) -> Launch:
    """For y[m, n] with ``supers`` super-blocks along K."""
    few = FEW_ALONE if n > 32 * processors else FEW_SPREAD
    c = few if m <= 8 else MANY if m > 16 and together else SOME
    return replace(c, parts=_parts(c, -(-m // c.bm) * -(-n // c.bn), supers, processors))


def gate_up_launch(pairs: int, experts: int, n: int, supers: int, processors: int) -> Launch:
    """For ``pairs`` (token, expert) pairs over ``experts`` experts of ``n`` hidden units on this rank."""
    if pairs > SEARCH_PAIRS:
        return FEW_WIDE if pairs <= 8 * experts else SOME_ALONE
    active = min(pairs, experts)
    c = FEW_ALONE if active * n > 32 * processors else FEW_SPREAD
    return replace(c, parts=_parts(c, active * -(-n // c.bn), supers, processors))


def down_launch(pairs: int, experts: int, n: int, processors: int) -> Launch:
    """For the second product of the same pairs: ``n`` outputs. Sorted pairs have the tile of tokens of the first."""
    c = FEW_WIDE if pairs <= max(8 * experts, SEARCH_PAIRS) else SOME
    tiles = round(min(pairs, experts) * -(-n // c.bn) / (5.5 * processors))
    return replace(c, tiles=max(1, min(tiles, 8 if pairs <= 4 * experts else 768 // c.bn)))


def across_launch(supers: int, super_bytes: int, shared: int, beside: int = 1) -> Launch:
    """For one token's product with ``supers`` super-blocks along K, as much of it under way as ``shared`` KiB hold.

    super_bytes: of one row. ``beside``, a power of two up to 16: gate's and up's entries, or those of a token's
    experts, in one program.
    """
    each = next(c for c in (8, 4, 2, 1) if supers % c == 0 and c * beside <= 16)
    rounds, entries = supers // each, each * beside
    round_bytes = entries * (ACROSS_ROWS * super_bytes + 512)  # 512: the super-block's part of x
    left = (shared << 10) - 1024 * entries - 512  # a number for every output and group, moved between threads
    buffers = max(1, min(rounds, left // round_bytes))
    return Launch(ACROSS_ROWS, 1, warps=each * beside, stages=buffers + 1, across=each)
