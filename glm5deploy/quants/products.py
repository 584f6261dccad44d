"""Linear products with planes on a GPU: planes and activations in, result out; routed_experts.py has the others.

Activations stay as they are (bf16) and weights are what the file says. Products with integers round weights of Q6_K and
IQ4_XS to 11 bits; where weights are unpacked for cuBLAS, each is rounded to bf16 once. Every launch is fit for CUDA
graphs, and calls on different streams may overlap.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants import gpu, integer_products, launch
from glm5deploy.quants.arguments import kernel_format, pointers, row_stride
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.formats import SUPER, Format
from glm5deploy.quants.linear_kernel import dense_kernel, linear_kernel, pair_kernel
from glm5deploy.quants.planes import Planes

DENSE_CHUNK_BYTES = 64 << 20  # of bf16 weights unpacked at a time for cuBLAS


def check_input(x: torch.Tensor, planes: Planes) -> None:
    """ValueError where x is not rows of a weight's inputs."""
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
    found, supers = gpu.describe(device), triton.cdiv(columns, SUPER)
    if found.integers and integer_products.has_integers(fmt, rows, columns):
        c = launch.integer_linear_launch(m, rows, supers, found.processors)
        if c is not None and rows >= c.bn:
            return c
    if m >= launch.DENSE_TOKENS:
        return None
    return launch.linear_launch(m, rows, supers, found.processors, found.together)


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
    check_input(x, planes)
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
    return launch.pair_launch(m, first.rows + second.rows, first.supers, gpu.describe(device).processors)


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
    check_input(x, first)
    check_input(x, second)
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
