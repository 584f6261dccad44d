"""Routed experts on a GPU: planes of experts, activations and a router's choice in, each token's sum out.

Products are as those of products.py, and a launch's types as few as there: calls on different streams may overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants import gpu, integer_products, launch
from glm5deploy.quants.arguments import Work, kernel_format, pointers, row_stride, work_memory
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.moe_kernel import down_kernel, gate_up_kernel, sort_kernel, sum_kernel
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.products import check_input

EXACT_TERMS = 1024  # up to so many pairs a token's terms are kept in fp32, then in the activations' type
INTEGER_ROWS = 64  # of the launch table's tiles
SUM_SPAN = 512  # outputs that a program of the sum over a token's experts takes


def _integers(planes: Planes) -> bool:
    """Whether a weight can be multiplied as integers, in any of the table's tiles."""
    return integer_products.has_integers(planes.format, planes.rows, planes.columns) and planes.rows >= INTEGER_ROWS


@dataclass(frozen=True, slots=True)
class _MoeLaunch:
    """Launches of gate and up and of down; how pairs are found (see moe_kernel.py); the type of terms."""

    gate_up: launch.Launch
    down: launch.Launch
    search: int
    exact: bool


def _moe_launch(
    tokens: int,
    topk: int,
    gate: Planes,
    up: Planes,
    down: Planes,
    device: torch.device,
    configs: tuple[launch.Launch, launch.Launch] | None = None,
) -> _MoeLaunch:
    pairs, experts, found = tokens * topk, gate.experts, gpu.describe(device)
    if configs is None and found.integers:
        first, second = _integers(gate) and _integers(up), _integers(down)
        if first or second:
            configs = launch.integer_moe_launch(
                pairs, experts, (gate.rows, gate.supers, first), (down.rows, down.supers, second), found.processors
            )
    a, b = configs or (
        launch.gate_up_launch(pairs, experts, gate.rows, gate.supers, found.processors),
        launch.down_launch(pairs, experts, down.rows, found.processors),
    )
    search = 0 if a.integers or b.integers or pairs > launch.SEARCH_PAIRS else 1 if tokens == 1 else launch.SEARCH_PAIRS
    return _MoeLaunch(a, b, search, pairs <= EXACT_TERMS)


def moe_key(tokens: int, gate: Planes, up: Planes, down: Planes, topk: int, device: torch.device) -> Hashable:
    """What of ``moe`` depends on the number of tokens and chooses a compiled variant."""
    c = _moe_launch(tokens, topk, gate, up, down, device)
    at_once = 0 if c.search else launch.sorted_at_once(tokens * topk)
    return c.gate_up.variant, c.down.variant, c.search, c.exact, at_once


def moe(
    x: torch.Tensor,
    gate: Planes,
    up: Planes,
    down: Planes,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    configs: tuple[launch.Launch, launch.Launch] | None = None,
    also: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate x) * up x), [T, hidden] in x's type.

    x bf16 [T, hidden]; planes of E experts, of any three types; topk_ids int32 or int64 [T, TOPK], ids < 0 marking
    experts of other ranks and padding; topk_weights [T, TOPK] of any float type. A row without ids >= 0 is zero.
    ``also`` is called once the products are launched; what it gives, [T, hidden], is added before the sum is rounded.
    """
    check_input(x, gate)
    tokens, topk = topk_ids.shape
    pairs, n, experts = tokens * topk, gate.rows, gate.experts
    if (up.rows, up.columns, down.columns) != (n, gate.columns, n) or {up.experts, down.experts} != {experts}:
        raise ValueError(f"experts of {n} hidden units, {gate.columns} inputs and {down.columns} do not fit each other")
    if out is None:
        out = torch.empty((tokens, down.rows), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    c = _moe_launch(tokens, topk, gate, up, down, x.device, configs)
    if c.gate_up.bm != c.down.bm and not c.search:
        raise ValueError(f"sorted pairs are cut for {c.gate_up.bm} tokens and would be multiplied by {c.down.bm}")
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    terms = torch.empty((pairs, down.rows), dtype=torch.float32 if c.exact else x.dtype, device=x.device)
    if c.gate_up.integers:
        work, fitted = integer_products.sort_and_fit(x, ids, experts, c.gate_up.bm)
        hidden = integer_products.gate_up(fitted, gate, up, topk, work, c.gate_up)
    else:
        work = _find_pairs(ids, experts, c)
        hidden = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
        _gate_up(x, gate, up, ids, work, hidden, c)
    if c.down.integers:
        integer_products.down(hidden, down, weights, work, terms, c.down)
    else:
        _down(hidden, down, ids, weights, work, terms, c)
    _sum(terms, ids, out, also)
    return out


def _find_pairs(ids: torch.Tensor, experts: int, c: _MoeLaunch) -> Work:
    """Nothing where programs search for their pairs."""
    pairs, bm = ids.numel(), c.gate_up.bm
    if c.search:
        empty = torch.empty(0, dtype=torch.int32, device=ids.device)
        return empty, empty
    work = work_memory(ids, experts, bm)
    sort_kernel[(experts,)](
        ids, *work, pairs, experts, BM=bm, CHUNK=launch.sorted_at_once(pairs), num_warps=4, **chained(ids.device)
    )
    return work


def _gate_up(
    x: torch.Tensor, gate: Planes, up: Planes, ids: torch.Tensor, work: Work, hidden: torch.Tensor, c: _MoeLaunch
) -> None:
    a, (pairs, n) = c.gate_up, hidden.shape
    blocks, items = triton.cdiv(n, a.bn), pairs if c.search else work[1].shape[0]
    parts, tickets = part_memory(a.parts, pairs, 2 * n, pairs * blocks, x.device)
    gate_up_kernel[(blocks, items, a.parts)](
        x, *pointers(gate), *pointers(up), ids, *work, hidden, parts, tickets, pairs, n, gate.columns,
        row_stride(x), gate.supers, a.parts, G=kernel_format(gate.format), U=kernel_format(up.format),
        TOPK=ids.shape[1], BN=a.bn, BM=a.bm, PAIRS=c.search, STAGES=a.stages,
        EVEN=gate.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, **a.options, **chained(x.device),
    )  # fmt: skip


def _down(
    hidden: torch.Tensor,
    down: Planes,
    ids: torch.Tensor,
    weights: torch.Tensor,
    work: Work,
    terms: torch.Tensor,
    c: _MoeLaunch,
) -> None:
    b, (pairs, n) = c.down, hidden.shape
    items = pairs if c.search else work[1].shape[0]
    down_kernel[(triton.cdiv(down.rows, b.bn * b.tiles), items)](
        hidden, *pointers(down), ids, *work, weights, terms, pairs, down.rows, n, down.supers, b.tiles,
        FMT=kernel_format(down.format), BN=b.bn, BM=b.bm, PAIRS=c.search,
        STAGES=b.stages, ONE=down.supers == 1, EVEN=n % 256 == 0, PTX=hidden.dtype == torch.bfloat16,
        **b.options, **chained(hidden.device),
    )  # fmt: skip


def _sum(terms: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, also: Callable[[], torch.Tensor] | None) -> None:
    more = out if also is None else also()
    if also is not None and (more.shape != out.shape or not more.is_contiguous()):
        raise ValueError(f"{tuple(more.shape)} cannot be added to {tuple(out.shape)}: shapes differ, or it has gaps")
    tokens, n = out.shape
    sum_kernel[(tokens, triton.cdiv(n, SUM_SPAN))](
        terms,
        ids,
        more,
        out,
        n,
        TOPK=ids.shape[1],
        BN=SUM_SPAN,
        ALSO=also is not None,
        num_warps=4,
        **chained(out.device),
    )
