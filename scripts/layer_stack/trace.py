"""GPU time by kernel of a step, from a trace that torch's profiler wrote in vLLM's worker.

A step reaches from the first kernel under vLLM's own mark of it (``execute_context_…``) to that of the next; the last
marked step of a trace has no end and is left out.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_MARK = "execute_"


@dataclass(frozen=True)
class Kernel:
    """``start`` and ``length`` in microseconds."""

    name: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Share:
    """Of one step, on average: microseconds on the GPU and launches."""

    name: str
    us: float
    launches: float


@dataclass(frozen=True)
class Breakdown:
    """``step_us`` from step to step, of which ``busy_us`` with at least one kernel running; ``steps`` were averaged.

    The kernels' times sum to more than ``busy_us`` where some run side by side.
    """

    steps: int
    step_us: float
    busy_us: float
    kernels: tuple[Share, ...]

    @property
    def launches(self) -> float:
        return sum(share.launches for share in self.kernels)

    @property
    def idle_us(self) -> float:
        return self.step_us - self.busy_us

    def grouped(self, group_of: Callable[[str], str]) -> list[Share]:
        """The kernels' times by group, most first."""
        us: dict[str, float] = defaultdict(float)
        launches: dict[str, float] = defaultdict(float)
        for share in self.kernels:
            us[group_of(share.name)] += share.us
            launches[group_of(share.name)] += share.launches
        return sorted((Share(name, us[name], launches[name]) for name in us), key=lambda share: -share.us)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The complete events of a trace, as ``torch.profiler`` exports it, with or without gzip."""
    data = path.read_bytes()
    events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def breakdown(events: Sequence[dict[str, Any]], mark: str = _MARK, skip: int = 0) -> Breakdown:
    """Average the complete steps whose names begin with ``mark``, without the first ``skip`` of them.

    ValueError when the trace has no kernels or no such step that is followed by another.
    """
    us: dict[str, float] = defaultdict(float)
    launches: dict[str, int] = defaultdict(int)
    busy = length = 0.0
    steps = steps_of(events, mark, skip)
    for step in steps:
        busy += _union(step.kernels)
        length += step.end - step.begin
        for kernel in step.kernels:
            us[kernel.name] += kernel.length
            launches[kernel.name] += 1
    count = len(steps)
    shares = (Share(name, us[name] / count, launches[name] / count) for name in us)
    return Breakdown(count, length / count, busy / count, tuple(sorted(shares, key=lambda share: -share.us)))


@dataclass(frozen=True)
class Step:
    """``begin`` and ``end`` in microseconds, and the kernels that began in it, in order."""

    begin: float
    end: float
    kernels: tuple[Kernel, ...]


def steps_of(events: Sequence[dict[str, Any]], mark: str = _MARK, skip: int = 0) -> list[Step]:
    """The complete steps whose names begin with ``mark``, without the first ``skip``; ValueError when there is none."""
    kernels = sorted(
        (Kernel(e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in _KERNELS),
        key=lambda kernel: kernel.start,
    )
    if not kernels:
        raise ValueError("the trace has no GPU kernels")
    spans = _spans(events, mark)[skip:]
    if not spans:
        raise ValueError(f"the trace has no whole step marked {mark}… after the first {skip}")
    return [Step(begin, end, tuple(k for k in kernels if begin <= k.start < end)) for begin, end in spans]


def _spans(events: Iterable[dict[str, Any]], mark: str) -> list[tuple[float, float]]:
    """Begin and end of every marked step that another step follows.

    A step that uses several streams is marked on each, on a second stream once for every stretch of work there. All
    lie within the first stream's mark, so only marks that begin after the one before has ended count.
    """
    marks = sorted(
        (float(e["ts"]), -float(e["dur"]), str(e["name"]))
        for e in events
        if e.get("cat") == "gpu_user_annotation" and e["name"].startswith(_MARK)
    )
    whole: list[tuple[float, str]] = []
    until = float("-inf")
    for at, minus, name in marks:
        if at >= until:
            whole.append((at, name))
            until = at - minus
    return [(at, after) for (at, name), (after, _) in pairwise(whole) if name.startswith(mark)]


def _union(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one of the kernels, sorted by start, runs."""
    busy, until = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy
