"""Torch's memory on the device while weights are placed there: what is freed is used again, and little stays unused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SPARE_BYTES = 1 << 30  # reserved and unused memory above which it is given back
_LIMIT = "max_split_size_mb:"


@contextmanager
def blocks_reused(device: torch.device) -> Iterator[None]:
    """Lift a limit on the reuse of blocks that vLLM sets while it loads a model.

    Under ``max_split_size_mb:20`` torch gives no free block of 20 MiB to a smaller request. But 20 MiB is what it
    reserves for any request of 1 to 10 MiB, and for one just below 20: such requests, made for every piece of a file,
    would each take new memory until the device has none left.
    """
    write = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if device.type != "cuda" or write is None or torch.cuda.memory.get_allocator_backend() != "native":
        yield
        return
    before = _settings()
    write(without_limit(before))
    try:
        yield
    finally:
        write(before)


def without_limit(settings: str) -> str:
    """An allocator's settings less the limit on splitting."""
    return ",".join(field for field in settings.split(",") if not field.strip().startswith(_LIMIT))


def _settings() -> str:
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    found = read() if read else torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    return str(found or "")


def give_back_spare(device: torch.device) -> None:
    """Return reserved memory that nothing uses to the device, when there is more than :data:`SPARE_BYTES`."""
    if device.type == "cuda" and _spare(device) > SPARE_BYTES:
        torch.cuda.empty_cache()


def _spare(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
