"""Products with planes on a GPU, the functions a quantisation method calls: planes and activations in, result out.

Activations stay as they are (bf16); a weight is rounded to bf16 once, as its scale is. Every launch is fit for CUDA
graphs. Tickets (see linear_kernel.py) are shared by all calls on a device, so calls must follow each other on a stream.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton

from glm5deploy.quants import launch
from glm5deploy.quants.formats import Format
from glm5deploy.quants.linear_kernel import dense_kernel, linear_kernel
from glm5deploy.quants.moe_kernel import down_kernel, gate_up_kernel, sort_kernel
from glm5deploy.quants.planes import Planes

DENSE_CHUNK_BYTES = 64 << 20  # of bf16 weights unpacked at a time for cuBLAS
EXACT_TERMS = 4096  # up to so many pairs a token's terms are kept in fp32, then in the activations' type
_tickets: dict[torch.device, torch.Tensor] = {}


def kernel_format(fmt: Format, fine: bool = False) -> tuple[object, ...]:
    """A format as kernels take it: (low, high, zero, scales, table, factor, fine).

    ``zero`` is taken off codes before scaling. ``fine`` multiplies by what bf16 cuts off the scale as well, so that a
    weight's only rounding is its own; three products in a row, as experts are, need that.

    Types with a minimum have it in the middle of the codes, which keeps the rest of the minimum small and its rounding
    harmless.
    """
    zero = 1 << (fmt.low + fmt.high - 1) if fmt.has_min else fmt.offset
    return fmt.low, fmt.high, zero, int(fmt.scales), fmt.table, fmt.factor, fine


def _pointers(planes: Planes) -> tuple[torch.Tensor, ...]:
    """Four planes; a missing one is stood in for by the first, which kernels then do not read."""
    low = planes.low
    return low, *(low if t is None else t for t in (planes.high, planes.words, planes.halves))


def _shared_tickets(count: int, device: torch.device) -> torch.Tensor:
    """Zeroed counters that every kernel leaves zeroed."""
    found = _tickets.get(device)
    if found is None or found.numel() < count:
        found = torch.zeros(max(count, 1 << 20), dtype=torch.int32, device=device)
        _tickets[device] = found
    return found


def _gpu(x: torch.Tensor) -> tuple[int, bool]:
    """Multiprocessors, and whether shared memory is the small kind; a stand-in for the interpreter."""
    if x.device.type != "cuda":
        return 4, False
    return _device(x.device)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, bool]:
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, (found.major, found.minor) in launch.SMALL_SHARED


def _check(x: torch.Tensor, planes: Planes) -> None:
    if x.dim() != 2 or x.shape[1] != planes.columns or x.stride(1) != 1:
        raise ValueError(f"x of shape {tuple(x.shape)} does not fit a {planes.format.name} weight of {planes.columns}")


def unpack_rows(planes: Planes, start: int, stop: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of a single weight as products see them, [stop - start, K]."""
    out = torch.empty((stop - start, planes.columns), dtype=dtype, device=planes.low.device)
    grid = (planes.supers, triton.cdiv(stop - start, 64))
    dense_kernel[grid](
        *_pointers(planes), out, planes.rows, start, stop, planes.columns, FMT=kernel_format(planes.format, True),
        BN=64, EVEN=planes.columns % 256 == 0, PTX=dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


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
    if m >= launch.DENSE_TOKENS and config is None:
        step = max(64, DENSE_CHUNK_BYTES // (2 * planes.columns) // 64 * 64)
        for start in range(0, n, step):
            stop = min(n, start + step)
            torch.matmul(x, unpack_rows(planes, start, stop, x.dtype).T, out=out[:, start:stop])
        return out
    c = config or launch.linear_launch(m, n, planes.supers, *_gpu(x))
    grid = (triton.cdiv(m, c.bm), triton.cdiv(n, c.bn), c.parts)
    parts = torch.empty((c.parts, m, n), dtype=torch.float32, device=x.device) if c.parts > 1 else x
    linear_kernel[grid](
        x, *_pointers(planes), out, parts, _shared_tickets(grid[0] * grid[1], x.device), m, n, planes.columns,
        x.stride(0), out.stride(0), planes.supers, FMT=kernel_format(planes.format), BN=c.bn, BM=c.bm, PARTS=c.parts,
        EVEN=planes.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip
    return out


def moe(
    x: torch.Tensor,
    gate: Planes,
    up: Planes,
    down: Planes,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    out: torch.Tensor | None = None,
    configs: tuple[launch.Launch, launch.Launch] | None = None,
) -> torch.Tensor:
    """Sum over each token's experts of weight * down(silu(gate x) * up x), [T, hidden] in x's type.

    x bf16 [T, hidden]; planes of E experts, of any three types; topk_ids int32 or int64 [T, TOPK], ids < 0 marking
    experts of other ranks and padding; topk_weights [T, TOPK] of any float type. A row without ids >= 0 is zero.
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
    out.zero_()  # no program writes a row without experts
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    gpu = _gpu(x)
    a, b = configs or (
        launch.gate_up_launch(pairs, experts, n, gate.supers, *gpu),
        launch.down_launch(pairs, experts, down.rows, down.supers, *gpu),
    )
    search = triton.next_power_of_2(pairs) if pairs <= launch.SEARCH_PAIRS else 0
    items = pairs if search else experts + pairs // a.bm
    order = torch.empty(1 if search else pairs, dtype=torch.int32, device=x.device)
    work = torch.empty((1 if search else items, 3), dtype=torch.int32, device=x.device)
    if not search:
        sort_kernel[(experts,)](ids, order, work, pairs, experts, BM=a.bm, CHUNK=1024, num_warps=4)
    blocks, spans = triton.cdiv(n, a.bn), triton.cdiv(down.rows, b.bn * b.tiles)
    tickets = _shared_tickets(max(pairs * blocks, tokens * spans), x.device)
    hidden = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    parts = torch.empty((a.parts, pairs, 2 * n), dtype=torch.float32, device=x.device) if a.parts > 1 else x
    ptx = x.dtype == torch.bfloat16
    gate_up_kernel[(blocks, items, a.parts)](
        x, *_pointers(gate), *_pointers(up), ids, order, work, hidden, parts, tickets, pairs, n, gate.columns,
        x.stride(0), gate.supers, G=kernel_format(gate.format, True), U=kernel_format(up.format, True), TOPK=topk,
        BN=a.bn, BM=a.bm,
        PARTS=a.parts, PAIRS=search, EVEN=gate.columns % 256 == 0, PTX=ptx, num_warps=a.warps,
        num_stages=a.stages,
    )  # fmt: skip
    terms = torch.empty((pairs, down.rows), dtype=torch.float32 if pairs <= EXACT_TERMS else x.dtype, device=x.device)
    down_kernel[(spans, items)](
        hidden, *_pointers(down), ids, order, work, weights, terms, out, tickets, pairs, down.rows, n, down.supers,
        FMT=kernel_format(down.format, True), TOPK=topk, BN=b.bn, BM=b.bm, TILES=b.tiles, PAIRS=search,
        ONE=down.supers == 1, EVEN=n % 256 == 0, PTX=ptx, num_warps=b.warps, num_stages=b.stages,
    )  # fmt: skip
    return out
