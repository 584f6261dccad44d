"""Launch parameters, chosen ahead of time: a table by GPU family, heads, tokens and cache type.

Nothing is measured or compiled while serving. `install --tune` measures the rows on the GPU at hand
(`scripts/bench_sparse_mla.py --tune`) and writes them to a file that `load_table` reads.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from pathlib import Path

# Shared memory one program may use, bytes.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, 121: 99 << 10}
MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188, 121: 48}
# e4m3 operands of a matrix product, and conversions, exist in Triton from here on.
FIRST_FP8_ARCH = 89


@dataclass(frozen=True)
class SparseConfig:
    """One launch of the sparse attention kernel."""

    block_heads: int  # heads of a program, 16 at least (the matrix unit's smallest row count)
    block_keys: int  # selected rows of one step
    warps: int
    stages: int
    per_sm: int  # programs a multiprocessor is meant to hold; the number of splits follows from it

    def splits(self, tokens: int, heads: int, keys: int, multiprocessors: int) -> int:
        """Splits of K that fill the GPU without leaving a program less than one step."""
        programs = tokens * -(-heads // self.block_heads)
        most = -(-keys // self.block_keys)
        return max(1, min(most, MAX_SPLITS, multiprocessors * self.per_sm // max(1, programs)))


MAX_SPLITS = 64


@dataclass(frozen=True)
class LogitsConfig:
    """One launch of an indexer logits kernel."""

    block_queries: int
    block_keys: int
    warps: int
    stages: int
    per_sm: int


@dataclass(frozen=True)
class SparseRow:
    """A table row: it serves heads <= max_heads and tokens <= max_tokens on the archs it names."""

    archs: tuple[int, ...]
    packed: bool
    max_heads: int
    max_tokens: int
    config: SparseConfig


_ANY = 1 << 30
_ALL = (80, 86, 89, 90, 100, 120, 121)
_LARGE = (80, 90, 100)
_SMALL = (86, 89, 120, 121)

SPARSE_TABLE: tuple[SparseRow, ...] = (
    SparseRow(_ALL, False, 16, 16, SparseConfig(16, 64, 4, 2, 2)),
    SparseRow(_ALL, False, 16, _ANY, SparseConfig(16, 32, 4, 2, 4)),
    SparseRow(_ALL, False, _ANY, 8, SparseConfig(16, 64, 4, 2, 1)),
    SparseRow((90,), False, _ANY, _ANY, SparseConfig(64, 32, 8, 3, 1)),
    SparseRow(_ALL, False, _ANY, _ANY, SparseConfig(32, 32, 8, 2, 2)),
    SparseRow(_ALL, True, _ANY, _ANY, SparseConfig(16, 32, 4, 2, 2)),
)
