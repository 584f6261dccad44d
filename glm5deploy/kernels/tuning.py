"""Launch parameters, chosen ahead of time: a table by GPU family, heads, tokens and cache type.

Nothing is measured or compiled while serving. `tune.py` measures rows on the GPU at hand and writes them to a file;
a process that finds the file named in GLM5DEPLOY_KERNEL_TABLE looks there first (`table_file.py`).
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from glm5deploy.kernels.table_file import Measured

TABLE_VARIABLE = "GLM5DEPLOY_KERNEL_TABLE"
# Architectures the table is compiled for in the tests, their shared memory for one program (bytes), multiprocessors.
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10, 121: 99 << 10}
# e4m3 operands of a matrix product exist in Triton from here on.
FIRST_FP8_ARCH = 89
MAX_SPLITS = 64
# Bytes a thread may spill to local memory before a launch counts as broken; a row that was measured to be the fastest
# in spite of more says so itself.
SPILL_LIMIT = 128

_ANY = 1 << 30
_LARGE = ("sm80", "sm90")
_ALL = ("sm80", "sm90", "small")


@dataclass(frozen=True, slots=True)
class SparseConfig:
    """One launch of the sparse attention kernel."""

    block_heads: int  # heads of a program, at least 16, the matrix unit's smallest row count (wgmma: 8, 16, 32 or 64)
    block_keys: int  # selected rows of one step
    warps: int
    stages: int
    per_sm: int  # programs a multiprocessor is meant to hold: the number of splits follows from it
    wgmma: int = 0  # 1: the kernel of sparse_mla_hopper.py; its block_keys, warps and stages are 64, 4 and 2

    def splits(self, tokens: int, heads: int, keys: int, multiprocessors: int) -> int:
        """Splits of K that fill the GPU and leave each program at least one step."""
        programs = tokens * -(-heads // self.block_heads)
        steps = -(-keys // self.block_keys)
        return max(1, min(steps, MAX_SPLITS, multiprocessors * self.per_sm // max(1, programs)))


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row of the table: it serves heads <= max_heads and tokens <= max_tokens; the first that fits is taken."""

    families: tuple[str, ...]
    packed: bool
    max_heads: int
    max_tokens: int
    config: SparseConfig
    spill_limit: int = SPILL_LIMIT


@dataclass(frozen=True, slots=True)
class LogitsConfig:
    """One launch of an indexer logits kernel; block_queries is the ragged kernel's alone."""

    block_queries: int
    block_keys: int
    warps: int
    stages: int
    per_sm: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice depends on: sm80 has 163 KiB of shared memory, sm90 227, small 99."""

    arch: int
    multiprocessors: int
    family: str
    name: str = ""


# Measured on an H200 (docs/benchmarks/kernels.md); the other families take the rows that fit their shared memory.
_WGMMA = {heads: SparseConfig(heads, 64, 4, 2, 1, wgmma=1) for heads in (8, 16, 32, 64)}
SPARSE_TABLE: tuple[SparseRow, ...] = (
    SparseRow(("sm90",), False, 8, 1024, _WGMMA[8]),
    SparseRow(("sm90",), False, 16, 256, _WGMMA[16]),
    SparseRow(_ALL, False, 16, 2, SparseConfig(16, 32, 4, 3, 1)),
    SparseRow(_ALL, False, 16, 16, SparseConfig(16, 64, 4, 2, 1)),
    SparseRow(_ALL, False, 16, 1024, SparseConfig(16, 64, 4, 2, 2)),
    SparseRow(_ALL, False, 16, _ANY, SparseConfig(16, 32, 2, 2, 4)),
    SparseRow(("sm90",), False, _ANY, 4, _WGMMA[16]),
    SparseRow(("sm90",), False, 32, _ANY, _WGMMA[32]),
    SparseRow(("sm90",), False, _ANY, 16, _WGMMA[32]),
    SparseRow(("sm90",), False, _ANY, _ANY, _WGMMA[64]),
    SparseRow(_ALL, False, _ANY, 32, SparseConfig(16, 64, 4, 2, 2)),
    SparseRow(_LARGE, False, _ANY, _ANY, SparseConfig(32, 64, 4, 2, 2), 256),
    SparseRow(("small",), False, _ANY, _ANY, SparseConfig(32, 32, 4, 2, 1)),
    SparseRow(("sm90",), True, 8, _ANY, _WGMMA[8]),
    SparseRow(("sm90",), True, 16, _ANY, _WGMMA[16]),
    SparseRow(("sm90",), True, _ANY, 4, _WGMMA[16]),
    SparseRow(("sm90",), True, 32, _ANY, _WGMMA[32]),
    SparseRow(("sm90",), True, _ANY, 16, _WGMMA[32]),
    SparseRow(("sm90",), True, _ANY, _ANY, _WGMMA[64], 256),
    SparseRow(_ALL, True, 16, 2, SparseConfig(16, 32, 4, 3, 1)),
    SparseRow(_ALL, True, 16, _ANY, SparseConfig(16, 32, 4, 2, 2)),
    SparseRow(("sm90",), True, _ANY, _ANY, SparseConfig(64, 32, 8, 2, 1), 640),
    SparseRow(_ALL, True, _ANY, _ANY, SparseConfig(16, 32, 4, 2, 2)),
)

# By (family, e4m3 operands).
RAGGED_TABLE: dict[tuple[str, bool], LogitsConfig] = {
    ("sm80", False): LogitsConfig(4, 64, 4, 3, 4),
    ("sm90", True): LogitsConfig(8, 64, 8, 4, 4),
    ("small", True): LogitsConfig(4, 64, 4, 3, 4),
    ("small", False): LogitsConfig(2, 64, 4, 3, 4),
}
PAGED_TABLE: dict[tuple[str, bool], LogitsConfig] = {
    ("sm80", False): LogitsConfig(0, 64, 4, 3, 4),
    ("sm90", True): LogitsConfig(0, 128, 4, 3, 4),
    ("small", True): LogitsConfig(0, 128, 4, 3, 4),
    ("small", False): LogitsConfig(0, 64, 4, 3, 4),
}

# The interpreter has no multiprocessors; few programs keep its tests short.
_INTERPRETED = Gpu(90, 4, "sm90")


def family_of(arch: int, shared_bytes: int) -> str:
    """Family of an architecture, the measured ones and those that come later, by what fits their shared memory."""
    if shared_bytes >= SHARED_LIMIT[90] and arch >= FIRST_FP8_ARCH:
        return "sm90"
    return "sm80" if shared_bytes >= SHARED_LIMIT[80] and arch < FIRST_FP8_ARCH else "small"


@functools.cache
def gpu(device: torch.device) -> Gpu:
    """The GPU of a tensor's device; a stand-in on a CPU, where only the interpreter runs."""
    if device.type != "cuda":
        return _INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    arch = properties.major * 10 + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT.get(arch, 99 << 10))
    return Gpu(arch, properties.multi_processor_count, family_of(arch, shared), properties.name)


def index_value_dtype(of: Gpu) -> torch.dtype:
    """What holds the indexer's e4m3 values: 16 bits, which represent them exactly, where no product takes e4m3."""
    return torch.float8_e4m3fn if of.arch >= FIRST_FP8_ARCH else torch.bfloat16


@functools.cache
def sparse_config(of: Gpu, packed: bool, heads: int, tokens: int) -> SparseConfig:
    """The first row that serves the launch, measured ones before the built-in table."""
    for row in sparse_rows(of, packed, heads):
        if tokens <= row.max_tokens:
            return row.config
    raise AssertionError(f"no table row for {of}, packed={packed}, heads={heads}, tokens={tokens}")


def sparse_rows(of: Gpu, packed: bool, heads: int) -> list[SparseRow]:
    """The rows that can serve this many heads, in the order they are tried."""
    # Measured ones are for the heads they were measured with alone, the table's for any number up to theirs.
    rows = (*(row for row in measured(of).rows if row.max_heads == heads), *SPARSE_TABLE)
    able = [row for row in rows if of.family in row.families and (not row.config.wgmma or wgmma_ready(of))]
    return [row for row in able if row.packed == packed and heads <= row.max_heads]


@functools.cache
def wgmma_ready(of: Gpu) -> bool:
    """Whether sparse_mla_hopper.py runs: on SM90 alone, with a Triton whose Gluon has `async_load` (3.8 and later)."""
    if of.arch != 90 or triton.knobs.runtime.interpret:
        return False
    try:
        from triton.experimental.gluon.language.nvidia.ampere import async_copy
    except ImportError:
        return False
    return hasattr(async_copy, "async_load")


def ragged_config(of: Gpu, fp8: bool) -> LogitsConfig:
    """Launch parameters of the prefill logits, for e4m3 or 16-bit operands."""
    return measured(of).ragged or RAGGED_TABLE.get((of.family, fp8), RAGGED_TABLE["small", fp8])


def paged_config(of: Gpu, fp8: bool) -> LogitsConfig:
    """Launch parameters of the decode logits, for e4m3 or 16-bit operands."""
    return measured(of).paged or PAGED_TABLE.get((of.family, fp8), PAGED_TABLE["small", fp8])


@functools.cache
def measured(of: Gpu) -> Measured:
    """What the file named in GLM5DEPLOY_KERNEL_TABLE holds for this GPU; nothing where the variable is unset."""
    from glm5deploy.kernels.table_file import Measured, load_table  # a file is made of this module's types

    path = os.environ.get(TABLE_VARIABLE)
    return load_table(Path(path), of) if path else Measured()
