"""Exact top-k of ragged rows: which kernels a launch takes, and their scratch memory.

A row that one program can hold goes to `topk_block`. Of longer rows every program of `topk_stream` takes one; few of
them would leave the GPU idle, so they are listed in parts, by many programs, before one program a row selects from the
lists. No result depends on timing: lists are in column order, and nothing is added up in an order that may change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from glm5deploy.kernels.layout import require
from glm5deploy.kernels.topk_block import topk_block_kernel
from glm5deploy.kernels.topk_stream import topk_parts_kernel, topk_stream_kernel
from glm5deploy.kernels.tuning import Gpu, gpu

MAX_K = 4096
MAX_PARTS = 32
# Rows that several programs may share: with more of them the GPU is busy anyway.
MOST_SHARED_ROWS = 512
# Columns of a row that a warp holds.
_WARP_COLUMNS = 512
# Of a thread, so that two programs of eight warps share a multiprocessor.
STREAM_REGISTERS = 128
# A kernel can start while the one before it runs from here on.
FIRST_EARLY_ARCH = 90


@dataclass(frozen=True, slots=True)
class TopkConfig:
    """Launches of the selection. A program holds 512 columns a warp; lists of candidates are as long."""

    block_warps: tuple[int, ...] = (8, 16)  # a row that fits one of these is held by one program
    stream_warps: int = 8  # one program a longer row
    part_warps: int = 8  # many programs a row
    merge_warps: tuple[int, int] = (8, 16)  # the one that then selects from their lists, of few rows and of more
    few_rows: int = 8  # with more of them, a list that overflows and makes all wait is likely
    samples: tuple[int, ...] = (
        2048,
        4096,
        8192,
    )  # columns that set the first threshold, of rows up to 32 times as long
    per_sm: int = 2  # programs a multiprocessor is meant to hold: the number of parts follows from it
    spared: int = 7  # blocks of columns that parts must spare a program to be worth a second launch

    def __post_init__(self) -> None:
        held = _WARP_COLUMNS * max(self.block_warps)
        require(max(self.samples) <= held, f"samples must not exceed {held} columns")

    def block(self, width: int) -> int:
        """Warps of a program that holds a whole row of `width` columns, 0 when none does."""
        return next((warps for warps in self.block_warps if width <= _WARP_COLUMNS * warps), 0)

    def parts(self, rows: int, width: int, multiprocessors: int) -> tuple[int, int]:
        """Programs that share a row of `width` columns, and blocks of columns that each of them has."""
        blocks = triton.cdiv(width, _WARP_COLUMNS * self.part_warps)
        programs = min(multiprocessors * self.per_sm, MOST_SHARED_ROWS)
        each = triton.cdiv(blocks, max(1, min(MAX_PARTS, programs // max(1, rows))))
        return (triton.cdiv(blocks, each), each) if blocks - each >= self.spared else (1, blocks)

    def merge(self, rows: int) -> int:
        """Warps of the program that selects from the lists of a row's parts."""
        return self.merge_warps[rows > self.few_rows]

    def sample(self, width: int) -> int:
        """Columns that set the threshold of a row of `width`."""
        return next((sample for sample in self.samples if width <= 32 * sample), self.samples[-1])


# Measured on an H200 (docs/benchmarks/kernels.md); by whether k is at most 2048.
_CONFIGS = {True: TopkConfig(), False: TopkConfig(stream_warps=16, merge_warps=(16, 16))}


def topk_config(k: int) -> TopkConfig:
    """Launch parameters for this k."""
    return _CONFIGS[k <= MAX_K // 2]


def _width(stride: int, max_length: int, has_starts: bool) -> int:
    """Columns to hold for a row: one that begins within 16 bytes has up to three in front."""
    return max_length if stride % 4 == 0 and not has_starts else max_length + 3


def topk_variant(rows: int, max_length: int, k: int, stride: int, of: Gpu) -> tuple[str, int, int, int]:
    """What `select_topk` launches on a GPU: launches with the same value share every compiled variant."""
    config = topk_config(k)
    width = _width(stride, max_length, has_starts=False)
    if warps := config.block(width):
        return "block", warps, 0, 0
    parts, _ = config.parts(rows, width, of.multiprocessors)
    if parts == 1:
        return "stream", config.stream_warps, config.sample(width), 0
    return "parts", config.merge(rows), config.sample(width), triton.next_power_of_2(parts)


def topk_workspace_elements(rows: int, max_length: int, k: int, config: TopkConfig | None = None) -> int:
    """int32 elements of scratch that `select_topk` needs for up to `rows` rows of up to `max_length` columns."""
    config = topk_config(k) if config is None else config
    if config.block(max_length + 3):
        return 0
    # Pairs of int32: a row's list, and those of its parts; behind them a count for each part.
    lists = min(rows * MAX_PARTS, MOST_SHARED_ROWS)
    held = max(rows * config.stream_warps, min(rows, MOST_SHARED_ROWS) * max(config.merge_warps))
    return 2 * _WARP_COLUMNS * (held + lists * config.part_warps) + lists


def select_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    max_length: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    config: TopkConfig | None = None,
) -> torch.Tensor:
    """`reference.select_topk` on the GPU: exact, ties by lower position, ascending, -1 padded.

    Args:
        logits: fp32 [T, S], unit column stride; memory is read in whole 16 bytes around each row.
        lengths: int32 [T]. starts: int32 [T], zeros when absent.
        k: 1 .. 4096. max_length: no length exceeds it; it fixes the launches, so a captured graph serves all lengths.
        out: int32 [T, >= k], unit column stride; the first k columns are written.
        workspace: int32, `topk_workspace_elements` of it.
    """
    rows = logits.shape[0]
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be fp32 with unit column stride")
    require(1 <= k <= MAX_K, f"k must be 1 .. {MAX_K}, got {k}")
    require(out.dtype == torch.int32 and out.shape[1] >= k and out.stride(1) == 1, "out must be int32 [T, >= k]")
    config = topk_config(k) if config is None else config
    width = _width(logits.stride(0), max_length, starts is not None)
    if rows == 0:
        return out
    first = lengths if starts is None else starts
    if warps := config.block(width):
        topk_block_kernel[(rows,)](
            logits,
            first,
            lengths,
            out,
            k,
            logits.stride(0),
            out.stride(0),
            HAS_STARTS=starts is not None,
            WARPS=warps,
            ASM=logits.is_cuda,
            num_warps=warps,
        )
        return out
    of = gpu(logits.device)
    parts, each = config.parts(rows, width, of.multiprocessors)
    warps = config.stream_warps if parts == 1 else config.merge(rows)
    require(k < _WARP_COLUMNS * warps, f"k must be less than {_WARP_COLUMNS * warps} with this configuration, got {k}")
    needed = topk_workspace_elements(rows, max_length, k, config)
    if workspace is None or workspace.numel() < needed:
        raise ValueError(f"rows that no program holds need a workspace of {needed} int32")
    pairs = workspace[: workspace.numel() // 2 * 2].view(torch.int64)
    entries = config.part_warps * _WARP_COLUMNS
    ends = rows * warps * _WARP_COLUMNS, rows * (warps * _WARP_COLUMNS + parts * entries)
    held, lists, counts = pairs[: ends[0]], pairs[ends[0] : ends[1]], pairs[ends[1] :].view(torch.int32)
    # The second kernel may start while the first one runs; it waits for its results itself.
    early = logits.is_cuda and of.arch >= FIRST_EARLY_ARCH
    if parts > 1:
        topk_parts_kernel[(rows, parts)](
            logits,
            first,
            lengths,
            counts,
            lists,
            k,
            each,
            logits.stride(0),
            HAS_STARTS=starts is not None,
            WARPS=config.part_warps,
            SAMPLE=config.sample(width),
            ASM=logits.is_cuda,
            EARLY=early,
            num_warps=config.part_warps,
            maxnreg=STREAM_REGISTERS,
        )
    topk_stream_kernel[(rows,)](
        logits,
        first,
        lengths,
        counts if parts > 1 else lengths,
        lists if parts > 1 else held,
        held,
        out,
        k,
        parts,
        logits.stride(0),
        out.stride(0),
        HAS_STARTS=starts is not None,
        WARPS=warps,
        SAMPLE=config.sample(width) if parts == 1 else config.samples[0],
        PARTS=triton.next_power_of_2(parts) if parts > 1 else 0,
        LIST=entries,
        ASM=logits.is_cuda,
        EARLY=early and parts > 1,
        num_warps=warps,
        maxnreg=STREAM_REGISTERS if parts == 1 else None,
        launch_pdl=early and parts > 1,
    )
    return out
