"""Exact top-k of ragged rows: which kernels a launch takes, and their scratch memory.

A row that one program can hold goes to `topk_steps`, or where that cannot run to `topk_block`. Of longer rows every
program of `topk_stream` takes one; few of them would leave the GPU idle, so they are listed in parts, by many programs,
before one program a row selects from the lists. No result depends on timing: lists are in column order, and
nothing is added up in an order that may change.
"""

from __future__ import annotations

import torch
import triton

from glm5deploy.kernels.chain import FIRST_CHAINED_ARCH
from glm5deploy.kernels.layout import require
from glm5deploy.kernels.topk_block import topk_block_kernel
from glm5deploy.kernels.topk_config import (
    BLOCK_REGISTERS,
    MAX_K,
    MAX_PARTS,
    MOST_SHARED_ROWS,
    STREAM_REGISTERS,
    WARP_COLUMNS,
    TopkConfig,
    topk_config,
)
from glm5deploy.kernels.topk_stream import topk_parts_kernel, topk_stream_kernel
from glm5deploy.kernels.tuning import Gpu, gpu


def _width(stride: int, max_length: int, has_starts: bool) -> int:
    """Columns to hold for a row: one that begins within 16 bytes has up to three in front."""
    return max_length if stride % 4 == 0 and not has_starts else max_length + 3


def topk_variant(rows: int, max_length: int, k: int, stride: int, of: Gpu) -> tuple[str, int, int, int]:
    """What `select_topk` launches on a GPU: launches with the same value share every compiled variant."""
    config = topk_config(k, of.arch)
    width = _width(stride, max_length, has_starts=False)
    if steps := config.step(width, rows > of.multiprocessors):
        return "steps", steps.warps, steps.groups, steps.registers or 0
    if warps := config.block(width):
        return "block", warps, 0, 0
    parts, _ = config.parts(rows, width, of.multiprocessors)
    sample = config.sample(width, parts)
    if parts == 1:
        return "stream", config.stream_warps, sample, 0
    return "parts", config.stream_warps, sample, triton.next_power_of_2(parts)


def topk_workspace_elements(rows: int, max_length: int, k: int, config: TopkConfig | None = None) -> int:
    """int32 elements of scratch that `select_topk` needs for up to `rows` rows of up to `max_length` columns, by keys.

    Steps need none, wherever they are taken.
    """
    config = topk_config(k, arch=0) if config is None else config
    if config.step(max_length + 3) or config.block(max_length + 3):
        return 0
    # Pairs of int32: a row's list, those of its parts, and behind them a count for each part.
    lists = min(rows * MAX_PARTS, MOST_SHARED_ROWS)
    return 2 * (WARP_COLUMNS * (rows * config.stream_warps + lists * config.part_warps) + lists)


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
        logits: fp32 [T, S], unit column stride; memory is read in whole 16 bytes around each row, behind a row's length
            too, whatever it holds.
        lengths: int32 [T]. starts: int32 [T], zeros when absent.
        k: 1 .. 4096. max_length: no length exceeds it; it fixes the launches, so a captured graph serves all lengths.
        out: int32 [T, >= k], unit column stride; the first k columns are written.
        workspace: int32, `topk_workspace_elements` of it.
    """
    rows = logits.shape[0]
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be fp32 with unit column stride")
    require(1 <= k <= MAX_K, f"k must be 1 .. {MAX_K}, got {k}")
    require(out.dtype == torch.int32 and out.shape[1] >= k and out.stride(1) == 1, "out must be int32 [T, >= k]")
    of = gpu(logits.device)
    config = topk_config(k, of.arch) if config is None else config
    width = _width(logits.stride(0), max_length, starts is not None)
    if rows == 0:
        return out
    first = lengths if starts is None else starts
    row_arguments = (logits, first, lengths, out, k, logits.stride(0), out.stride(0))
    crowded = rows > of.multiprocessors
    if steps := config.step(width, crowded):
        from glm5deploy.kernels.topk_steps import topk_steps_kernel  # needs Gluon: `steps_ready`

        # Columns behind a row's end cost nothing where its length is what is waited for; many rows wait for memory.
        columns = 0 if crowded or starts is not None else min(max_length, logits.shape[1])
        topk_steps_kernel[(rows,)](
            *row_arguments,
            columns,
            HAS_STARTS=starts is not None,
            WARPS=steps.warps,
            GROUPS=steps.groups,
            LOG_BINS=steps.log_bins,
            SPARING=steps.sparing,
            num_warps=steps.warps,
            maxnreg=steps.registers,
        )
        return out
    if warps := config.block(width):
        topk_block_kernel[(rows,)](
            *row_arguments,
            HAS_STARTS=starts is not None,
            WARPS=warps,
            ASM=logits.is_cuda,
            num_warps=warps,
            maxnreg=BLOCK_REGISTERS,
        )
        return out
    parts, each = config.parts(rows, width, of.multiprocessors)
    warps = config.stream_warps
    require(k < WARP_COLUMNS * warps, f"k must be less than {WARP_COLUMNS * warps} with this configuration, got {k}")
    needed = topk_workspace_elements(rows, max_length, k, config)
    if workspace is None or workspace.numel() < needed:
        raise ValueError(f"rows that no program holds need a workspace of {needed} int32")
    pairs = workspace[: workspace.numel() // 2 * 2].view(torch.int64)
    entries = config.part_warps * WARP_COLUMNS
    ends = rows * warps * WARP_COLUMNS, rows * (warps * WARP_COLUMNS + parts * entries)
    held, lists, counts = pairs[: ends[0]], pairs[ends[0] : ends[1]], pairs[ends[1] :]
    # The second kernel may start while the first one runs; it waits for its results itself.
    early = logits.is_cuda and of.arch >= FIRST_CHAINED_ARCH
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
            SAMPLE=config.sample(width, parts),
            ASM=logits.is_cuda,
            EARLY=early,
            num_warps=config.part_warps,
            maxnreg=STREAM_REGISTERS,
        )
    topk_stream_kernel[(rows,)](
        logits,
        first,
        lengths,
        counts if parts > 1 else held,
        lists if parts > 1 else held,
        held,
        out,
        k,
        parts,
        logits.stride(0),
        out.stride(0),
        HAS_STARTS=starts is not None,
        WARPS=warps,
        SAMPLE=config.sample(width, parts) if parts == 1 else config.samples[1],
        PARTS=triton.next_power_of_2(parts) if parts > 1 else 0,
        LIST=entries,
        ASM=logits.is_cuda,
        EARLY=early and parts > 1,
        num_warps=warps,
        maxnreg=STREAM_REGISTERS if parts == 1 else None,
        launch_pdl=early and parts > 1,
    )
    return out
