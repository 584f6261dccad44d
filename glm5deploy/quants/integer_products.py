"""Products with integers, launched: what products.py takes for types with blocks of 256 where launch.py says so."""

from __future__ import annotations

import functools

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants.activations import fit_kernel, sort_fit_kernel
from glm5deploy.quants.arguments import Work, kernel_format, pointers, row_stride, work_memory
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.formats import Format, Scales
from glm5deploy.quants.launch import Launch, sorted_at_once
from glm5deploy.quants.planes import Planes

FIT_WARPS, FIT_SUPERS = 4, 8  # warps of a program that fits rows, and super-blocks that it takes, about
MOST_ACTIVATIONS = 2**31 - 1  # of one product: their places are counted in int32
_INTEGERS = frozenset({Scales.K2, Scales.K3, Scales.K4, Scales.K6, Scales.X4, Scales.NIBBLE, Scales.NIBBLE16})
Fitted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # activations, sums, scales: see fit_kernel


@functools.cache
def gluon_ready() -> bool:
    """Whether this Triton's Gluon has what the kernels need (3.8 and later); the interpreter has none."""
    if triton.knobs.runtime.interpret:
        return False
    try:
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia.ampere import async_copy
    except ImportError:
        return False
    return hasattr(language, "barrier") and hasattr(async_copy, "async_load")


def has_integers(fmt: Format, rows: int, columns: int) -> bool:
    """Whether a weight can be multiplied as integers: its type and shape."""
    return fmt.scales in _INTEGERS and columns % 256 == 0 and rows % 16 == 0


def _room(x: torch.Tensor) -> Fitted:
    """Memory for x [R, K] fitted; ValueError for what the kernels would silently get wrong."""
    rows, columns = x.shape
    if x.dtype != torch.bfloat16:
        raise ValueError(f"products with integers take activations in bfloat16, not in {x.dtype}")
    if x.numel() > MOST_ACTIVATIONS:
        raise ValueError(f"{rows} rows of {columns} activations are more than {MOST_ACTIVATIONS}")
    fitted = torch.empty((rows, columns), dtype=torch.float16, device=x.device)
    sums = torch.empty((rows, columns // 8), dtype=torch.float16, device=x.device)
    return fitted, sums, torch.empty(rows, dtype=torch.float32, device=x.device)


def _blocks(rows: int, columns: int) -> tuple[int, dict[str, int]]:
    """Programs that fit so many rows, and their tile: short rows are taken several at a time."""
    supers = triton.next_power_of_2(columns // 256)
    each = max(1, FIT_SUPERS // supers)
    return triton.cdiv(rows, each), {"ROWS": each, "SUPERS": supers}


def fit(x: torch.Tensor) -> Fitted:
    """bf16 [R, K], K a multiple of 256, as ``fit_kernel`` has it; ValueError for other types and too many."""
    rows, columns = x.shape
    found = _room(x)
    blocks, tile = _blocks(rows, columns)
    fit_kernel[(blocks,)](x, *found, rows, columns, row_stride(x), num_warps=FIT_WARPS, **tile, **chained(x.device))
    return found


def sort_and_fit(x: torch.Tensor, ids: torch.Tensor, experts: int, bm: int) -> tuple[Work, Fitted]:
    """Order and work items of all pairs (moe_kernel.py), cut for tiles of ``bm``, and x bf16 [T, K] as of ``fit``."""
    rows, columns = x.shape
    pairs, work, found = ids.numel(), work_memory(ids, experts, bm), _room(x)
    blocks, tile = _blocks(rows, columns)
    sort_fit_kernel[(experts + blocks,)](
        ids, *work, pairs, experts, x, *found, rows, columns, row_stride(x),
        BM=bm, CHUNK=sorted_at_once(pairs), num_warps=FIT_WARPS, **tile, **chained(x.device),
    )  # fmt: skip
    return work, found


def gate_up(fitted: Fitted, gate: Planes, up: Planes, topk: int, work: Work, c: Launch) -> torch.Tensor:
    """Hidden units bf16 [P, N] of sorted pairs."""
    from glm5deploy.quants.integer_moe import integer_gate_up_kernel  # Gluon: ``gluon_ready``

    (order, items), n = work, gate.rows
    pairs = order.shape[0]
    hidden = torch.empty((pairs, n), dtype=torch.bfloat16, device=order.device)
    blocks = triton.cdiv(n, c.bn)
    parts, tickets = part_memory(c.parts, pairs, 2 * n, pairs * blocks, order.device)
    integer_gate_up_kernel[(blocks, items.shape[0], c.parts)](
        *fitted, *pointers(gate), *pointers(up), order, items, hidden, parts, tickets, pairs, n, gate.supers, c.parts,
        G=kernel_format(gate.format), U=kernel_format(up.format), TOPK=topk, BN=c.bn, BM=c.bm, WARPS=c.warps,
        STAGES=c.stages, **c.options, **chained(order.device),
    )  # fmt: skip
    return hidden


def down(
    hidden: torch.Tensor, planes: Planes, weights: torch.Tensor, work: Work, terms: torch.Tensor, c: Launch
) -> None:
    """Terms [P, outputs] of sorted pairs: weights [T, TOPK] times the second product of hidden bf16 [P, K]."""
    from glm5deploy.quants.integer_moe import integer_down_kernel  # Gluon: ``gluon_ready``

    order, items = work
    integer_down_kernel[(triton.cdiv(planes.rows, c.bn * c.tiles), items.shape[0])](
        *fit(hidden), *pointers(planes), order, items, weights, terms, planes.rows, c.tiles,
        FMT=kernel_format(planes.format), SUPERS=planes.supers, BN=c.bn, BM=c.bm, WARPS=c.warps, STAGES=c.stages,
        **c.options, **chained(hidden.device),
    )  # fmt: skip


def linear(x: torch.Tensor, planes: Planes, out: torch.Tensor, c: Launch) -> None:
    """out [M, N] = x bf16 [M, K] times a weight."""
    from glm5deploy.quants.integer_linear import integer_linear_kernel  # Gluon: ``gluon_ready``

    m, n = out.shape
    grid = (triton.cdiv(m, c.bm), triton.cdiv(n, c.bn), c.parts)
    parts, tickets = part_memory(c.parts, grid[0] * c.bm, grid[1] * c.bn, grid[0] * grid[1], x.device)
    integer_linear_kernel[grid](
        *fit(x), *pointers(planes), out, parts, tickets, m, n, out.stride(0), planes.supers, c.parts,
        FMT=kernel_format(planes.format), BN=c.bn, BM=c.bm, WARPS=c.warps, STAGES=c.stages, **c.options,
        **chained(x.device),
    )  # fmt: skip
