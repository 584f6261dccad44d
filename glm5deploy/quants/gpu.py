"""What a launch depends on of the GPU that it is for."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from glm5deploy.quants import integer_products, launch


class Gpu(NamedTuple):
    """Multiprocessors; whether four warps multiply a tile together; whether products with integers run."""

    processors: int
    together: bool
    integers: bool


def describe(device: torch.device) -> Gpu:
    """A stand-in for the interpreter."""
    return _device(device) if device.type == "cuda" else Gpu(4, True, False)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> Gpu:
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.major in launch.TOGETHER, integer_products.gluon_ready())
