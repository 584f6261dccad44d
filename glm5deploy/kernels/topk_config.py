"""How the top-k of ragged rows is launched: which kernel takes a row, with how many warps, in how many parts."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from glm5deploy.kernels.layout import require

MAX_K = 4096
MAX_PARTS = 32
# Rows that several programs may share: with more of them the GPU is busy anyway.
MOST_SHARED_ROWS = 512
# Columns of a row that a warp holds.
WARP_COLUMNS = 512
# Of a thread, so that two programs of eight warps share a multiprocessor.
STREAM_REGISTERS = 128
# A kernel can start while the one before it runs from here on.
FIRST_EARLY_ARCH = 90


@dataclass(frozen=True, slots=True)
class Steps:
    """A launch of `topk_steps`."""

    warps: int
    groups: int  # of 128 columns that a warp holds
    registers: int | None  # a thread may use, None for any number
    log_bins: int = 7
    ctas: int = 1  # programs of a cluster that share a row

    def __post_init__(self) -> None:
        require(self.groups % 4 == 0, f"groups must be a multiple of 4, got {self.groups}")

    @property
    def columns(self) -> int:
        """Longest row, with what comes in front of it within 16 bytes."""
        return 128 * self.ctas * self.warps * self.groups


@dataclass(frozen=True, slots=True)
class TopkConfig:
    """Launches of the selection. A program holds 512 columns a warp; lists of candidates are as long."""

    block_warps: tuple[int, ...] = (8, 16)  # a row that fits one of these is held by one program
    stream_warps: int = 8  # one program a longer row
    part_warps: int = 8  # many programs a row
    merge_warps: tuple[int, int] = (8, 16)  # the one that then selects from their lists, of few rows and of more
    few_rows: int = 8  # with more of them, a list that overflows and makes all wait is likely
    samples: tuple[int, ...] = (2048, 4096, 8192)  # columns that set the first threshold, for rows of up to 32 times
    per_sm: int = 2  # programs a multiprocessor is meant to hold: the number of parts follows from it
    spared: int = 7  # blocks of columns that parts must spare a program to be worth a second launch
    steps: tuple[Steps, ...] = ()  # a row that fits one of these is held by one program of `topk_steps` instead
    block_registers: int | None = None  # a thread of `topk_block` may use, None for any number

    def __post_init__(self) -> None:
        held = WARP_COLUMNS * max(self.block_warps)
        require(max(self.samples) <= held, f"samples must not exceed {held} columns")

    def block(self, width: int) -> int:
        """Warps of a program that holds a whole row of `width` columns, 0 when none does."""
        return next((warps for warps in self.block_warps if width <= WARP_COLUMNS * warps), 0)

    def step(self, width: int) -> Steps | None:
        """The launch of `topk_steps` for a row of `width` columns."""
        return next((steps for steps in self.steps if width <= steps.columns), None)

    def parts(self, rows: int, width: int, multiprocessors: int) -> tuple[int, int]:
        """Programs that share a row of `width` columns, and blocks of columns that each of them has."""
        blocks = triton.cdiv(width, WARP_COLUMNS * self.part_warps)
        programs = min(multiprocessors * self.per_sm, MOST_SHARED_ROWS)
        each = triton.cdiv(blocks, max(1, min(MAX_PARTS, programs // max(1, rows))))
        return (triton.cdiv(blocks, each), each) if blocks - each >= self.spared else (1, blocks)

    def merge(self, rows: int) -> int:
        """Warps of the program that selects from the lists of a row's parts."""
        return self.merge_warps[rows > self.few_rows]

    def sample(self, width: int) -> int:
        """Columns that set the threshold of a row of `width`."""
        return next((sample for sample in self.samples if width <= 32 * sample), self.samples[-1])


_SHORT = (Steps(8, 4, 64), Steps(16, 4, 64))
# For k of at most 2048. The first one was measured on an H200 (docs/benchmarks/kernels.md), the others are there to be:
# `scripts/bench_indexer.py --sweep` compares them with it.
VARIANTS: dict[str, TopkConfig] = {
    "keys": TopkConfig(),
    "keys, two programs": TopkConfig(block_registers=64),
    "keys, parts of 8192": TopkConfig(part_warps=16, spared=3),
    "steps": TopkConfig(steps=(*_SHORT, Steps(16, 8, None, 8), Steps(16, 16, 128, 8))),
    "steps, 256 bins": TopkConfig(steps=(Steps(16, 4, 64, 8),)),
    "steps, few warps": TopkConfig(steps=(Steps(8, 8, None, 8),)),
    "steps, clusters": TopkConfig(
        steps=(
            *_SHORT,
            Steps(16, 4, 64, 8, ctas=2),
            Steps(16, 4, 64, 8, ctas=4),
            Steps(16, 8, None, 8, ctas=4),
            Steps(16, 8, None, 8, ctas=8),
        )
    ),
    "steps, many warps": TopkConfig(steps=(*_SHORT, Steps(32, 8, 64, 8))),
}
_CONFIGS = {True: VARIANTS["keys"], False: TopkConfig(stream_warps=16, merge_warps=(16, 16))}


@functools.cache
def topk_config(k: int) -> TopkConfig:
    """Launch parameters for this k."""
    return runnable(_CONFIGS[k <= MAX_K // 2])


def runnable(config: TopkConfig) -> TopkConfig:
    """The same without the steps that cannot run: with Triton before 3.8, in the interpreter; clusters before SM90."""
    most = 0 if not config.steps or not steps_ready() else 8 if _has_clusters() else 1
    return replace(config, steps=tuple(steps for steps in config.steps if steps.ctas <= most))


@functools.cache
def _has_clusters() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def steps_ready() -> bool:
    """Whether this Triton's Gluon has what `topk_steps` needs (3.8 and later)."""
    if triton.knobs.runtime.interpret:
        return False
    try:
        from triton.experimental.gluon import language
    except ImportError:
        return False
    return hasattr(language.shared_memory_descriptor, "atomic_scatter_add")
