"""What products pass to their kernels: formats, planes, and experts' pairs."""

from __future__ import annotations

import torch

from glm5deploy.quants.formats import Format
from glm5deploy.quants.planes import Planes

Work = tuple[torch.Tensor, torch.Tensor]  # pairs by expert, and chunks of them; empty where programs search


def kernel_format(fmt: Format) -> tuple[object, ...]:
    """A format as kernels take it: (low, high, offset, scales, table, factor)."""
    return fmt.low, fmt.high, fmt.offset, int(fmt.scales), fmt.table, fmt.factor


def pointers(planes: Planes) -> tuple[torch.Tensor, ...]:
    """Four planes; a missing one is stood in for by the first, which kernels then do not read."""
    low = planes.low
    return low, *(low if t is None else t for t in (planes.high, planes.words, planes.halves))


def row_stride(x: torch.Tensor) -> int:
    """One row has any stride; kernels are compiled for that of a matrix."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def work_memory(ids: torch.Tensor, experts: int, bm: int) -> Work:
    """For what ``sort_kernel`` finds out about ids [T, TOPK], in chunks of ``bm`` pairs."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    return order, torch.empty((experts + pairs // bm, 3), dtype=torch.int32, device=ids.device)
