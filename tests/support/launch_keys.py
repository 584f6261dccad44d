"""Collects the keys by which Triton tells variants apart, for launches on tensors of a CPU. Nothing is compiled or run.

Binder, specialisation and key are Triton's own; only the GPU's driver is stood in for, by one that names a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from glm5deploy.kernels.prepare import Launch


class NamesATarget:
    """What a launch asks a driver before it looks for a compiled variant."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def pretend(arch: int) -> None:
    """From here on this process's launches are for a GPU of that architecture."""
    triton.runtime.driver.set_active(NamesATarget(arch))


def compare(launches: Iterable[Launch], step: Callable[[], None], *left_out: str) -> dict[str, list[str]]:
    """Variants that only ``step`` launched: ``missing``, and ``noticed`` had warm-up left out these kinds."""
    warm: dict[str, str] = {}
    kept: dict[str, str] = {}
    for launch in launches:
        with keys() as found:
            launch.call()
        warm |= found
        if launch.variant[0] not in left_out:
            kept |= found
    with keys() as stepped:
        step()
    return {
        "missing": [stepped[key] for key in sorted(stepped.keys() - warm.keys())],
        "noticed": [stepped[key] for key in sorted(stepped.keys() - kept.keys())],
    }


@contextmanager
def keys() -> Iterator[dict[str, str]]:
    """Every launch in the context: key -> what it was. None of them runs."""
    found: dict[str, str] = {}

    def note(**facts: Any) -> bool:
        function = facts["fn"]
        name, compiled = f"{function.module}.{function.name}", facts["compile"]
        told = f"{name}: {compiled['signature']} {compiled['constants']} {compiled['configs']}"
        found.setdefault(f"{name} {facts['key']}", told)
        return True  # stop here

    triton.knobs.runtime.jit_cache_hook = note
    try:
        yield found
    finally:
        triton.knobs.runtime.jit_cache_hook = None
