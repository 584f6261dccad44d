"""Products with planes on a GPU, the functions a quantisation method calls: planes and activations in, result out.

Activations stay as they are (bf16) and weights are what the file says. Where weights are unpacked for cuBLAS, each is
rounded to bf16 once. Every launch is fit for CUDA graphs, and calls on different streams may overlap.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from glm5deploy.quants import launch
from glm5deploy.quants.formats import Format
from glm5deploy.quants.linear_kernel import dense_kernel, linear_kernel
from glm5deploy.quants.moe_kernel import down_kernel, gate_up_kernel, sort_kernel, sum_kernel
from glm5deploy.quants.planes import Planes

DENSE_CHUNK_BYTES = 64 << 20  # of bf16 weights unpacked at a time for cuBLAS
EXACT_TERMS = 1024  # up to so many pairs a token's terms are kept in fp32, then in the activations' type
SUM_SPAN = 512  # outputs that a program of the sum over a token's experts takes
TICKETS = 1 << 14  # tiles of one launch that parts of K can be counted at
STREAMS = 128  # of one process that products run on: more than torch deals out
_tickets: dict[torch.device, tuple[torch.Tensor, dict[int, int]]] = {}


def kernel_format(fmt: Format) -> tuple[object, ...]:
    """A format as kernels take it: (low, high, offset, scales, table, factor)."""
    return fmt.low, fmt.high, fmt.offset, int(fmt.scales), fmt.table, fmt.factor


def _pointers(planes: Planes) -> tuple[torch.Tensor, ...]:
    """Four planes; a missing one is stood in for by the first, which kernels then do not read."""
    low = planes.low
    return low, *(low if t is None else t for t in (planes.high, planes.words, planes.halves))


def _prepare_tickets(device: torch.device) -> None:
    """Make the counters of all streams; not in a capture, where zeroing would happen at the graph's replay only."""
    if device not in _tickets and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        _tickets[device] = torch.zeros((STREAMS, TICKETS), dtype=torch.int32, device=device), {}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # other streams do not wait for this one's zeros


def _stream_tickets(count: int, device: torch.device) -> torch.Tensor:
    """``count`` counters of the current stream, which every kernel leaves zeroed."""
    _prepare_tickets(device)
    if device not in _tickets:
        raise RuntimeError("a device's first product cannot be captured in a CUDA graph")
    counters, places = _tickets[device]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    place = places.setdefault(stream, len(places))
    if place >= STREAMS or count > TICKETS:
        raise RuntimeError(
            f"no counters for {count} tiles on stream {place + 1}: {TICKETS} on each of {STREAMS} streams"
        )
    return counters[place]


def _part_memory(
    parts: int, rows: int, width: int, tiles: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [parts, rows, width] and counters for ``tiles`` tiles; nothing where a program sums all of K."""
    _prepare_tickets(device)
    if parts == 1:
        return torch.empty(0, device=device), torch.empty(0, dtype=torch.int32, device=device)
    return torch.empty((parts, rows, width), dtype=torch.float32, device=device), _stream_tickets(tiles, device)


def _gpu(device: torch.device) -> tuple[int, bool]:
    """Multiprocessors, and whether four warps multiply a tile together; a stand-in for the interpreter."""
    if device.type != "cuda":
        return 4, True
    return _device(device)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, bool]:
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.major in launch.TOGETHER


def _check(x: torch.Tensor, planes: Planes) -> None:
    if x.dim() != 2 or x.shape[1] != planes.columns or x.stride(1) != 1:
        raise ValueError(f"x of shape {tuple(x.shape)} does not fit a {planes.format.name} weight of {planes.columns}")


def unpack_rows(planes: Planes, start: int, stop: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of a single weight as products see them, [stop - start, K]."""
    out = torch.empty((stop - start, planes.columns), dtype=dtype, device=planes.low.device)
    grid = (planes.supers, triton.cdiv(stop - start, 64))
    dense_kernel[grid](
        *_pointers(planes), out, planes.rows, start, stop, planes.columns, FMT=kernel_format(planes.format),
        BN=64, EVEN=planes.columns % 256 == 0, PTX=dtype == torch.bfloat16, num_warps=4,
    )  # fmt: skip
    return out


def _linear_launch(m: int, planes: Planes, device: torch.device) -> launch.Launch | None:
    """None where weights are unpacked for cuBLAS."""
    if m >= launch.DENSE_TOKENS:
        return None
    return launch.linear_launch(m, planes.rows, planes.supers, *_gpu(device))


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
    grid = (triton.cdiv(m, c.bm), triton.cdiv(n, c.bn), c.parts)
    parts, tickets = _part_memory(c.parts, m, n, grid[0] * grid[1], x.device)
    linear_kernel[grid](
        x, *_pointers(planes), out, parts, tickets, m, n, planes.columns, _row_stride(x), out.stride(0), planes.supers,
        c.parts, FMT=kernel_format(planes.format), BN=c.bn, BM=c.bm, STAGES=c.stages,
        EVEN=planes.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, num_warps=c.warps,
    )  # fmt: skip
    return out


def _row_stride(x: torch.Tensor) -> int:
    """One row has any stride; kernels are compiled for that of a matrix."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


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
    down: Planes,
    device: torch.device,
    configs: tuple[launch.Launch, launch.Launch] | None = None,
) -> _MoeLaunch:
    pairs, experts, (processors, _) = tokens * topk, gate.experts, _gpu(device)
    a, b = configs or (
        launch.gate_up_launch(pairs, experts, gate.rows, gate.supers, processors),
        launch.down_launch(pairs, experts, down.rows, processors),
    )
    search = 1 if tokens == 1 else launch.SEARCH_PAIRS if pairs <= launch.SEARCH_PAIRS else 0
    return _MoeLaunch(a, b, search, pairs <= EXACT_TERMS)


def moe_key(tokens: int, gate: Planes, up: Planes, down: Planes, topk: int, device: torch.device) -> Hashable:
    """What of ``moe`` depends on the number of tokens and chooses a compiled variant."""
    c = _moe_launch(tokens, topk, gate, down, device)
    return c.gate_up.variant, c.down.variant, c.search, c.exact


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
    c = _moe_launch(tokens, topk, gate, down, x.device, configs)
    a, b, ptx = c.gate_up, c.down, x.dtype == torch.bfloat16
    if not c.search and a.bm != b.bm:
        raise ValueError(f"sorted pairs are cut for {a.bm} tokens and would be multiplied by {b.bm}")
    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    items = pairs if c.search else experts + pairs // a.bm
    order = torch.empty(0 if c.search else pairs, dtype=torch.int32, device=x.device)
    work = torch.empty((0 if c.search else items, 3), dtype=torch.int32, device=x.device)
    if not c.search:
        sort_kernel[(experts,)](ids, order, work, pairs, experts, BM=a.bm, CHUNK=1024, num_warps=4)
    blocks = triton.cdiv(n, a.bn)
    hidden = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    parts, tickets = _part_memory(a.parts, pairs, 2 * n, pairs * blocks, x.device)
    gate_up_kernel[(blocks, items, a.parts)](
        x, *_pointers(gate), *_pointers(up), ids, order, work, hidden, parts, tickets, pairs, n, gate.columns,
        _row_stride(x), gate.supers, a.parts, G=kernel_format(gate.format), U=kernel_format(up.format), TOPK=topk,
        BN=a.bn, BM=a.bm, PAIRS=c.search, STAGES=a.stages,
        EVEN=gate.columns % 256 == 0, PTX=ptx, num_warps=a.warps,
    )  # fmt: skip
    terms = torch.empty((pairs, down.rows), dtype=torch.float32 if c.exact else x.dtype, device=x.device)
    down_kernel[(triton.cdiv(down.rows, b.bn * b.tiles), items)](
        hidden, *_pointers(down), ids, order, work, weights, terms, pairs, down.rows, n, down.supers, b.tiles,
        FMT=kernel_format(down.format), BN=b.bn, BM=b.bm, PAIRS=c.search, STAGES=b.stages,
        ONE=down.supers == 1, EVEN=n % 256 == 0, PTX=ptx, num_warps=b.warps,
    )  # fmt: skip
    sum_kernel[(tokens, triton.cdiv(down.rows, SUM_SPAN))](
        terms, ids, out, down.rows, TOPK=topk, BN=SUM_SPAN, num_warps=4
    )
    return out
