"""Launch parameters, chosen without trying: tile sizes and splits from the shapes and the GPU's size.

The numbers come from sweeps on an H200 (docs/benchmarks/quants.md). One super-block of a tile is a *step*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TOGETHER = frozenset({9, 10})  # major compute capabilities whose four warps multiply a tile together (wgmma, tcgen05)
DENSE_TOKENS = 65  # from here on, weights are unpacked to bf16 once and multiplied by cuBLAS
PAIR_TOKENS = 16  # up to here, two weights of the same activations are one launch where they are asked for together
SEARCH_PAIRS = 128  # up to here, programs find their expert's pairs themselves; a power of two
MOST_PARTS = 8  # of K, for one tile; all are read at once to be added up
# What one more program that splits K costs a multiprocessor, in super-blocks: linear weights, experts
LINEAR_PART, EXPERT_PART = 1.25, 0.75
INTEGER_PART = 2.25  # of tiles of 32 tokens


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile BN × BM, parts of K, output tiles a program takes in turn, and Triton's warps and pipeline stages.

    ``resident``: programs that a multiprocessor holds at a time, about. ``late``, of a linear weight: load codes and
    activations where they are multiplied (tile_product.py). ``registers``: the most a thread may have; 0: no limit but
    the GPU's. ``integers``: the kernels of integer_moe.py and integer_linear.py.
    """

    bn: int
    bm: int
    parts: int = 1
    tiles: int = 1
    warps: int = 4
    stages: int = 3
    resident: int = 4
    late: bool = False
    registers: int = 0
    integers: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.parts <= MOST_PARTS:
            raise ValueError(f"{self.parts} parts of K; 1 to {MOST_PARTS} can be added up")

    @property
    def variant(self) -> tuple[int, ...]:
        """What a kernel is compiled for; parts and tiles are arguments."""
        return self.bn, self.bm, self.warps, self.stages, self.late, self.registers, self.integers

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside a kernel's arguments."""
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


FEW_WIDE = Launch(64, 8, warps=2)
FEW_ALONE = Launch(32, 8, warps=1, resident=12)  # a warp to itself: best where programs are many
FEW_SPREAD = Launch(32, 8, warps=2, resident=8)  # best where they are few
ONE_ALONE = Launch(16, 8, warps=1)  # of many short rows for one token: no parts to add up
SOME = Launch(64, 16, warps=2)
SOME_SPREAD = Launch(32, 16, warps=2)
SOME_ALONE = Launch(32, 16, warps=1, resident=8)
MANY = Launch(64, 32, resident=3)
# Of weights of many rows (measured at 19,360, the output head on one of eight ranks).
LONG_FEW = Launch(32, 8, parts=3, warps=1, stages=2, late=True)
LONG_SOME = Launch(64, 16, parts=3, warps=2, stages=2, late=True, registers=112)
# Products with integers, where weights can be: experts of more pairs, and weights that take longer than fitting x.
INTEGER_PAIRS = 40  # up to here, programs that find their expert's pairs themselves are faster
INTEGER_TOKENS = 192  # up to here, weights of many rows
INTEGER_X = 128  # super-blocks of activations that shared memory holds
INTEGER_FEW = Launch(64, 8, stages=2, integers=True)
INTEGER_SOME = Launch(64, 16, stages=2, registers=128, integers=True)
INTEGER_MORE = Launch(32, 32, warps=2, stages=2, resident=5, integers=True)
INTEGER_MANY = Launch(64, 32, stages=2, integers=True)
INTEGER_LONG = Launch(64, 64, stages=2, integers=True)


def _split(c: Launch, programs: int, supers: int, processors: int, part: float) -> Launch:
    """``c`` with the parts of K after which the busiest multiprocessor ends soonest; ``part``: see LINEAR_PART."""

    def steps(parts: int) -> float:
        waves = -(-programs * parts // (processors * c.resident))
        return waves * -(-supers // parts) + part * -(-programs * parts // processors)

    return replace(c, parts=min(range(1, min(MOST_PARTS, supers) + 1), key=steps))


def _long(n: int, supers: int, processors: int) -> bool:
    """Whether a weight has many rows, as the output head."""
    return n > 64 * processors and supers > 8


def integer_linear_launch(m: int, n: int, supers: int, processors: int) -> Launch | None:
    """For y[m, n] of a weight that can be multiplied as integers; None where that is not worth it."""
    if _long(n, supers, processors):
        if m > 32:
            return INTEGER_LONG if m <= INTEGER_TOKENS else None
        return replace(INTEGER_FEW if m <= 8 else INTEGER_SOME if m <= 16 else INTEGER_MANY, parts=2)
    if m <= 8 or m >= DENSE_TOKENS or (m <= 16 and n * supers < 300 * processors):
        return None
    if m <= 16 or (m <= 32 and n <= 16 * processors):
        c, part = INTEGER_SOME, LINEAR_PART
    else:
        c, part = INTEGER_MORE, INTEGER_PART
    return _split(c, -(-m // c.bm) * -(-n // c.bn), supers, processors, part)


def linear_launch(m: int, n: int, supers: int, processors: int, together: bool = True) -> Launch:
    """For y[m, n] with ``supers`` super-blocks along K."""
    if _long(n, supers, processors) and m <= 16:
        return LONG_FEW if m <= 8 else LONG_SOME
    if m == 1 and n > 32 * processors and 1 < supers <= 8:
        return ONE_ALONE
    few = FEW_ALONE if n > 12 * processors else FEW_SPREAD
    some = SOME if n > 16 * processors else SOME_SPREAD
    c = few if m <= 8 else MANY if m > 16 and together else some
    return _split(c, -(-m // c.bm) * -(-n // c.bn), supers, processors, LINEAR_PART)


def pair_launch(m: int, n: int, supers: int, processors: int) -> Launch | None:
    """For two weights of ``n`` rows together; None where they are launches of their own."""
    if m > PAIR_TOKENS:
        return None
    few = FEW_ALONE if n > 32 * processors else FEW_SPREAD
    c = few if m <= 8 else SOME
    return _split(c, -(-m // c.bm) * -(-n // c.bn), supers, processors, LINEAR_PART)


def sorted_at_once(pairs: int) -> int:
    """Pairs that a program which sorts them looks at together."""
    return 1024 if pairs <= 8192 else 4096


def gate_up_launch(pairs: int, experts: int, n: int, supers: int, processors: int) -> Launch:
    """For ``pairs`` (token, expert) pairs over ``experts`` experts of ``n`` hidden units on this rank."""
    if pairs > SEARCH_PAIRS:
        return FEW_WIDE if pairs <= 8 * experts else SOME_ALONE
    active = min(pairs, experts)
    c = FEW_ALONE if active * n > 32 * processors else FEW_SPREAD
    return _split(c, active * -(-n // c.bn), supers, processors, EXPERT_PART)


def down_launch(pairs: int, experts: int, n: int, processors: int) -> Launch:
    """For the second product of the same pairs: ``n`` outputs. Sorted pairs have the tile of tokens of the first."""
    if pairs <= SEARCH_PAIRS and pairs * n <= 512 * processors:  # one token of GLM-5
        return replace(FEW_ALONE, tiles=max(1, round(pairs * n / (FEW_ALONE.bn * 4 * processors))))
    c = FEW_WIDE if pairs <= max(8 * experts, SEARCH_PAIRS) else SOME
    return replace(c, tiles=_span(c, pairs, experts, n, processors))


def integer_moe_launch(
    pairs: int, experts: int, gate_up: tuple[int, int, bool], down: tuple[int, int, bool], processors: int
) -> tuple[Launch, Launch] | None:
    """For both products of sorted pairs, at least one of weights that can be integers; None where it is not worth it.

    Each product: rows of a weight, super-blocks, and whether it can. The second keeps all of its activations in shared
    memory. Where the other product cannot, both have its tile of tokens.
    """
    (units, supers, first), (outputs, down_supers, second) = gate_up, down
    most = INTEGER_X // down_supers if second else INTEGER_X
    most = most if first and second else min(most, INTEGER_SOME.bm)
    if pairs <= (INTEGER_PAIRS if first and second else SEARCH_PAIRS) or most < INTEGER_FEW.bm:
        return None
    if pairs <= 5 * experts or most < INTEGER_SOME.bm:
        c = INTEGER_FEW
    else:
        c = INTEGER_SOME if pairs <= 16 * experts or most < INTEGER_MANY.bm else INTEGER_MANY
    a, b = (FEW_WIDE, FEW_WIDE) if c is INTEGER_FEW else (SOME_ALONE, SOME)
    if first:
        programs = max(min(pairs, experts), pairs // c.bm) * -(-units // c.bn)
        a = replace(c, parts=max(1, min(MOST_PARTS, supers, c.resident * processors // programs)))
    if second:
        # A third stage is worth it for few tokens, where 99 KiB of shared memory have room for it beside activations.
        stages = 3 if c is INTEGER_FEW and 2 * c.bm * down_supers <= INTEGER_X else 2
        return a, replace(c, stages=stages, registers=0, tiles=6 if pairs <= experts else 12)
    return a, replace(b, tiles=_span(b, pairs, experts, outputs, processors))


def _span(c: Launch, pairs: int, experts: int, n: int, processors: int) -> int:
    """Tiles that a program of the second product takes in turn."""
    tiles = round(min(pairs, experts) * -(-n // c.bn) / (5.5 * processors))
    return max(1, min(tiles, 8 if pairs <= 4 * experts else 768 // c.bn))


def one_token_launch(topk: int, n: int, supers: int, outputs: int, processors: int) -> tuple[Launch, Launch]:
    """For both products of one token's ``topk`` experts and the shared one, which is one more of them.

    ``n`` hidden units of ``supers`` super-blocks, ``outputs`` outputs.
    """
    experts = topk + 1
    # Two experts' loops and the choice would be given 254 registers, of which four programs fit a multiprocessor.
    gate_up = replace(gate_up_launch(experts, experts, n, supers, processors), registers=128)
    down = down_launch(experts, experts, outputs, processors)
    return gate_up, replace(down, tiles=-(-experts * outputs // (down.bn * 4 * processors)))
