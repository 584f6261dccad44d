"""Prepares kernels before serving: every launch that a process will need, compiled side by side, then run once more."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from glm5deploy.kernels.compile_counter import CompileCounter, Prepared

_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Launch:
    """A call that launches kernels. Calls with equal ``variant`` need the same ones, as far as can be told cheaply.

    Its first part names the kind of kernels.
    """

    variant: tuple[Hashable, ...]
    call: Callable[[], object]


def first_of_each(key: Callable[[int], Hashable], numbers: Iterable[int]) -> list[int]:
    """The first of ``numbers`` with each value of ``key``: one for every variant."""
    first: dict[Hashable, int] = {}
    for number in numbers:
        first.setdefault(key(number), number)
    return list(first.values())


def prepare(
    launches: Sequence[Launch],
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
    told: Callable[[int, int], None] | None = None,
) -> list[Prepared]:
    """Run ``launches`` on the device's current stream; returns the variants that were compiled or loaded for them.

    Threads compile one launch of each variant first. Each of the ``ranks`` processes of a machine begins elsewhere in
    the list, so that it finds on the disk what the others have compiled. ``told`` hears how many of how many are done.
    """
    chosen = list({launch.variant: launch for launch in launches}.values())
    start = len(chosen) * rank // ranks
    order = [*chosen[start:], *chosen[:start]]
    with CompileCounter() as counter:
        if device.type == "cuda":
            _side_by_side(order, device, max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // ranks)), told)
        # Two threads that meet a kernel for the first time at once may lose a variant; here it is loaded again.
        for launch in launches:
            launch.call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return counter.found


def _side_by_side(
    launches: Sequence[Launch], device: torch.device, threads: int, told: Callable[[int, int], None] | None
) -> None:
    stream = torch.cuda.current_stream(device)

    def run(launch: Launch) -> None:
        # One stream for all: launches share scratch memory and must follow each other.
        with torch.inference_mode(), torch.cuda.device(device), torch.cuda.stream(stream):
            launch.call()

    with ThreadPoolExecutor(threads) as pool:
        for done, _ in enumerate(pool.map(run, launches), 1):
            if told is not None:
                told(done, len(launches))
