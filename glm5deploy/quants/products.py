"""Products with planes on a GPU, the functions a quantisation method calls: planes and activations in, result out.

Activations stay as they are (bf16) and weights are what the file says. Products with integers round weights of Q6_K and
IQ4_XS to 11 bits; where weights are unpacked for cuBLAS, each is rounded to bf16 once. Every launch is fit for CUDA
graphs, and calls on different streams may overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants import integer_products, launch
from glm5deploy.quants.arguments import Work, kernel_format, pointers, row_stride, work_memory
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.formats import SUPER, Format
from glm5deploy.quants.linear_kernel import dense_kernel, linear_kernel, pair_kernel
from glm5deploy.quants.moe_kernel import down_kernel, gate_up_kernel, sort_kernel, sum_kernel
from glm5deploy.quants.planes import Planes

DENSE_CHUNK_BYTES = 64 << 20  # of bf16 weights unpacked at a time for cuBLAS
EXACT_TERMS = 1024  # up to so many pairs a token's terms are kept in fp32, then in the activations' type
INTEGER_ROWS = 64  # of the launch table's tiles for experts
SUM_SPAN = 512  # outputs that a program of the sum over a token's experts takes


class Gpu(NamedTuple):
    """Multiprocessors; whether four warps multiply a tile together; whether products with integers run."""

    processors: int
    together: bool
    integers: bool


def _gpu(device: torch.device) -> Gpu:
    """A stand-in for the interpreter."""
    return _device(device) if device.type == "cuda" else Gpu(4, True, False)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.major in launch.TOGETHER, integer_products.gluon_ready())


def _check(x: torch.Tensor, planes: Planes) -> None:
    if x.dim() != 2 or x.shape[1] != planes.columns or x.stride(1) != 1:
        raise ValueError(f"x of shape {tuple(x.shape)} does not fit a {planes.format.name} weight of {planes.columns}")


def unpack_rows(planes: Planes, start: int, stop: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of a single weight as products see them, [stop - start, K]."""
    out = torch.empty((stop - start, planes.columns), dtype=dtype, device=planes.low.device)
    grid = (planes.supers, triton.cdiv(stop - start, 64))
    dense_kernel[grid](
        *pointers(planes), out, planes.rows, start, stop, planes.columns, FMT=kernel_format(planes.format),
        BN=64, EVEN=planes.columns % 256 == 0, PTX=dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


def linear_launch(m: int, fmt: Format, rows: int, columns: int, device: torch.device) -> launch.Launch | None:
    """What ``linear`` launches for m tokens; None where weights are unpacked for cuBLAS."""
    gpu, supers = _gpu(device), triton.cdiv(columns, SUPER)
    if gpu.integers and integer_products.has_integers(fmt, rows, columns):
        c = launch.integer_linear_launch(m, rows, supers, gpu.processors)
        if c is not None and rows >= c.bn:
            return c
    if m >= launch.DENSE_TOKENS:
        return None
    return launch.linear_launch(m, rows, supers, gpu.processors, gpu.together)


def _integers(planes: Planes) -> bool:
    """Whether a weight can be multiplied as integers, in any of the table's tiles."""
    return integer_products.has_integers(planes.format, planes.rows, planes.columns) and planes.rows >= INTEGER_ROWS


def _linear_launch(m: int, planes: Planes, device: torch.device) -> launch.Launch | None:
    return linear_launch(m, planes.format, planes.rows, planes.columns, device)


def linear_key(tokens: int, planes: Planes, device: torch.device) -> Hashable:
    """What of ``linear`` depends on the number of tokens and chooses a compiled variant."""
    c = _linear_launch(tokens, planes, device)
    return c and c.variant


def linear(
    x: torch.Tensor, planes: Planes, out: torch.Tensor | None = None, config: launch.Launch | None = None
) -> torch.Tensor:
    """x bf16 [M, K] times a weight's planes (E = 1) to [M, N] in x's type. ``config`` overrides the launch table."""
    _check(x, planes)
    m, n = x.shape[0], planes.rows
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    c = config or _linear_launch(m, planes, x.device)
    if c is None:
        step = max(64, DENSE_CHUNK_BYTES // (2 * planes.columns) // 64 * 64)
        for start in range(0, n, step):
            stop = min(n, start + step)
            torch.matmul(x, unpack_rows(planes, start, stop, x.dtype).T, out=out[:, start:stop])
        return out
    if c.integers:
        integer_products.linear(x, planes, out, c)
        return out
    grid = (triton.cdiv(m, c.bm), triton.cdiv(n, c.bn), c.parts)
    parts, tickets = part_memory(c.parts, m, n, grid[0] * grid[1], x.device)
    linear_kernel[grid](
        x, *pointers(planes), out, parts, tickets, m, n, planes.columns, row_stride(x), out.stride(0), planes.supers,
        c.parts, FMT=kernel_format(planes.format), BN=c.bn, BM=c.bm, STAGES=c.stages, LATE=c.late,
        EVEN=planes.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, **c.options, **chained(x.device),
    )  # fmt: skip
    return out


def _pair_launch(m: int, first: Planes, second: Planes, device: torch.device) -> launch.Launch | None:
    """None where the two are launches of their own."""
    return launch.pair_launch(m, first.rows + second.rows, first.supers, _gpu(device).processors)


def linear_pair_key(tokens: int, first: Planes, second: Planes, device: torch.device) -> Hashable:
    """As ``linear_key``, of ``linear_pair``."""
    c = _pair_launch(tokens, first, second, device)
    return ("pair", c.variant) if c else (linear_key(tokens, first, device), linear_key(tokens, second, device))


def linear_pair(
    x: torch.Tensor,
    first: Planes,
    second: Planes,
    out: torch.Tensor | None = None,
    config: launch.Launch | None = None,
) -> torch.Tensor:
    """x bf16 [M, K] times two weights (E = 1) of any types: [M, rows of both], side by side, in x's type.

    One launch where the launch table says so or ``config`` is given, else two calls of ``linear``.
    """
    _check(x, first)
    _check(x, second)
    if out is None:
        out = torch.empty((x.shape[0], first.rows + second.rows), dtype=x.dtype, device=x.device)
    c = config or _pair_launch(x.shape[0], first, second, x.device)
    if c is None:
        linear(x, first, out[:, : first.rows])
        linear(x, second, out[:, first.rows :])
    elif x.shape[0]:
        _pair(x, first, second, out, c)
    return out


def _pair(x: torch.Tensor, first: Planes, second: Planes, out: torch.Tensor, c: launch.Launch) -> None:
    m, width = out.shape
    grid = (triton.cdiv(m, c.bm), triton.cdiv(first.rows, c.bn) + triton.cdiv(second.rows, c.bn), c.parts)
    parts, tickets = part_memory(c.parts, m, width, grid[0] * grid[1], x.device)
    pair_kernel[grid](
        x, *pointers(first), *pointers(second), out, parts, tickets, m, first.rows, second.rows, first.columns,
        row_stride(x), out.stride(0), first.supers, c.parts, A=kernel_format(first.format),
        B=kernel_format(second.format), BN=c.bn, BM=c.bm, STAGES=c.stages,
        EVEN=first.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, **c.options, **chained(x.device),
    )  # fmt: skip


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
    pairs, experts, gpu = tokens * topk, gate.experts, _gpu(device)
    if configs is None and gpu.integers:
        first, second = _integers(gate) and _integers(up), _integers(down)
        if first or second:
            configs = launch.integer_moe_launch(
                pairs, experts, (gate.rows, gate.supers, first), (down.rows, down.supers, second), gpu.processors
            )
    a, b = configs or (
        launch.gate_up_launch(pairs, experts, gate.rows, gate.supers, gpu.processors),
        launch.down_launch(pairs, experts, down.rows, gpu.processors),
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
    _check(x, gate)
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
