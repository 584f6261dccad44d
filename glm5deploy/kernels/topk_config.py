"""How the top-k of ragged rows is launched: which kernel takes a row, with how many warps, in how many parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import triton

from glm5deploy.kernels.layout import require

MAX_K = 4096
MAX_PARTS = 32
# Rows that several programs may share: with more of them the GPU is busy anyway.
MOST_SHARED_ROWS = 512
# Columns of a row that a warp holds.
WARP_COLUMNS = 512
# Of a thread, so that two programs of sixteen warps share a multiprocessor, and two of eight.
BLOCK_REGISTERS = 64
STREAM_REGISTERS = 128
# Where `topk_steps` was measured; others keep to keys.
STEPS_ARCH = 90
# The longest row, with what comes in front of it within 16 bytes, that `topk_steps` takes.
STEPS_COLUMNS = 16_384


@dataclass(frozen=True, slots=True)
class Steps:
    """A launch of `topk_steps`."""

    warps: int
    groups: int  # of 128 columns that a warp holds: 4, 6 or 8
    registers: int | None = BLOCK_REGISTERS  # a thread may use, None for any number
    log_bins: int = 7

    def __post_init__(self) -> None:
        require(self.groups in (4, 6, 8), f"groups must be 4, 6 or 8, got {self.groups}")

    @property
    def columns(self) -> int:
        """Longest row, with what comes in front of it within 16 bytes."""
        return 128 * self.warps * self.groups

    @property
    def sparing(self) -> bool:
        """Whether the kernel must spare registers: twice as many columns a thread in as many of them."""
        return self.groups == 8 and self.registers is not None


# The first one that a row fits is taken. Where two programs must share a multiprocessor, all of them leave room for it.
STEPS = (Steps(8, 4), Steps(16, 4), Steps(16, 6, None), Steps(16, 8, None))
CROWDED_STEPS = (*STEPS[:2], Steps(16, 6), Steps(16, 8))


@dataclass(frozen=True, slots=True)
class TopkConfig:
    """Launches of the selection. A program that sorts by keys holds 512 columns a warp; lists are as long."""

    block_warps: tuple[int, ...] = (8, 16)  # a row that fits one of these is held by one program
    stream_warps: int = 8  # one program a longer row, or the one that selects from the lists of its parts
    part_warps: int = 8  # many programs a row
    samples: tuple[int, ...] = (2048, 4096, 8192)  # columns that set the first threshold, of ever longer rows
    per_sm: int = 2  # programs a multiprocessor is meant to hold: the number of parts follows from it
    spared: int = 3  # blocks of columns that parts must spare a program to be worth a second launch
    steps_columns: int = 0  # rows of up to so many are held by one program of `topk_steps` instead

    def __post_init__(self) -> None:
        held = WARP_COLUMNS * max(self.block_warps)
        require(max(self.samples) <= held, f"samples must not exceed {held} columns")

    def block(self, width: int) -> int:
        """Warps of a program that holds a whole row of `width` columns, 0 when none does."""
        return next((warps for warps in self.block_warps if width <= WARP_COLUMNS * warps), 0)

    def step(self, width: int, crowded: bool = False) -> Steps | None:
        """The launch of `topk_steps` for rows of `width` columns; crowded: more of them than multiprocessors."""
        launches = CROWDED_STEPS if crowded else STEPS
        return next((steps for steps in launches if width <= min(steps.columns, self.steps_columns)), None)

    def parts(self, rows: int, width: int, multiprocessors: int) -> tuple[int, int]:
        """Programs that share a row of `width` columns, and blocks of columns that each of them has."""
        blocks = triton.cdiv(width, WARP_COLUMNS * self.part_warps)
        programs = min(multiprocessors * self.per_sm, MOST_SHARED_ROWS)
        each = triton.cdiv(blocks, max(1, min(MAX_PARTS, programs // max(1, rows))))
        return (triton.cdiv(blocks, each), each) if blocks - each >= self.spared else (1, blocks)

    def sample(self, width: int, parts: int) -> int:
        """Columns that set the threshold of a row of `width`: more where parts share a list, late if it overflows."""
        most = 8 if parts > 1 else 32
        return next((sample for sample in self.samples if width <= most * sample), self.samples[-1])


_SHIPPED = {True: TopkConfig(steps_columns=STEPS_COLUMNS), False: TopkConfig(stream_warps=16)}
# For k of at most 2048, both ways of which the first is put together: `scripts/bench_indexer.py --sweep` compares them.
VARIANTS: dict[str, TopkConfig] = {"keys": TopkConfig(), "steps": TopkConfig(steps_columns=STEPS_COLUMNS)}


@functools.cache
def topk_config(k: int, arch: int) -> TopkConfig:
    """Launch parameters for this k on a GPU of this architecture."""
    return runnable(_SHIPPED[k <= MAX_K // 2], arch)


def runnable(config: TopkConfig, arch: int) -> TopkConfig:
    """The same without steps where they cannot run, or were never measured: with Triton before 3.8, not on SM90."""
    return config if arch == STEPS_ARCH and steps_ready() else replace(config, steps_columns=0)


@functools.cache
def steps_ready() -> bool:
    """Whether this Triton's Gluon has what `topk_steps` needs (3.8 and later); the interpreter has none.

    Gluon has no version of its own. `topk_steps` needs its barrier, and a histogram that counts by atomic additions in
    shared memory. The method asked for shows those: it adds in shared memory itself, though nothing here calls it.
    Earlier ones count by votes, an instruction for each bit of a bin, and were never measured.
    """
    if triton.knobs.runtime.interpret:
        return False
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return False
    return hasattr(language, "barrier") and hasattr(language.shared_memory_descriptor, "atomic_scatter_add")
