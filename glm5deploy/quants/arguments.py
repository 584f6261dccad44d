"""What products pass to their kernels: formats, planes, and how launches begin."""

from __future__ import annotations

from functools import lru_cache

import torch

from glm5deploy.quants import launch
from glm5deploy.quants.formats import Format
from glm5deploy.quants.planes import Planes


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


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def shared_memory(device: torch.device) -> int:
    """KiB of shared memory that a program may have."""
    known = launch.SHARED.get(_capability(device)) if device.type == "cuda" else None
    return known or launch.LEAST_SHARED


@lru_cache(maxsize=16)
def _can_begin_early(device: torch.device) -> bool:
    """Whether the GPU and this Triton have programmatic dependent launch."""
    if device.type != "cuda" or _capability(device) < (9, 0):
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    return "launch_pdl" in CUDAOptions.__dataclass_fields__


def early_options(early: bool, device: torch.device) -> dict[str, bool]:
    """Options of a launch: ``EARLY`` of the kernel, and Triton's own where it is to begin early and can."""
    if early and _can_begin_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
