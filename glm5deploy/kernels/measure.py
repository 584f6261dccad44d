"""Times kernels the way they run while serving: as replays of a CUDA graph, over inputs larger than the L2 cache."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

# Calls captured into one graph when the replay's own cost is to be spread.
CALLS_PER_GRAPH = 16
# Written once for each replay to come: at 4 TB/s 60 us, more than the host needs to launch one.
_AHEAD_BYTES = 1 << 28


def graph_time(calls: Sequence[Callable[[], object]], repeats: int = 20, per_graph: int = CALLS_PER_GRAPH) -> float:
    """Median microseconds of one call, from replays of a graph that holds `per_graph` of them.

    `calls` do the same work on different inputs and are taken in turn, so that no replay finds its inputs in cache.
    The replays queue up behind other work, as a server's do: launched one by one on an idle device, each time would
    hold what the host needs to launch a graph, several microseconds that vary from run to run.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(per_graph):
            calls[index % len(calls)]()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    ahead = torch.empty(_AHEAD_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(repeats):
        ahead.fill_(0)
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 / per_graph for a, b in pairwise(events))


def wall_time(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one call by the clock, once through all of them: for what runs on a CPU."""
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) * 1e6 / len(calls)


def relative_rms(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Root-mean-square error over the root-mean-square of the reference; NaN anywhere gives NaN."""
    difference = (value.double() - reference.double()).norm()
    return float(difference / reference.double().norm().clamp_min(1e-30))
