"""Is the server still getting anywhere? Tokens produced against requests running; and what to do when it is not.

A hung collective or kernel leaves all processes alive and ``/health`` green while nothing is produced, so the only
sign is that requests run and no counter moves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from glm5deploy.errors import DeployError
from glm5deploy.server.client import Client, RequestFailed
from glm5deploy.server.process import ServerProcess

_POLL = 5.0  # seconds
_LAST_WORDS = 3.0  # seconds in which a server that is about to end says so
_METRICS_TIMEOUT = 10.0
_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_RUNNING = "vllm:num_requests_running"
# Whatever of these moves is progress. Chunks of a long prompt show in the steps and in the cache's usage only.
_MOVING = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:iteration_tokens_total_count",
    "vllm:kv_cache_usage_perc",
    "vllm:request_success_total",
)


class Stalled(DeployError):
    """The server's processes live, but it produces nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """``running`` requests; ``moving`` values of the counters that move while anything is done."""

    running: int
    moving: tuple[float, ...]


def read_load(text: str) -> Load:
    """Sums over all engines of Prometheus text; what is absent or no number counts as 0."""
    sums = dict.fromkeys((_RUNNING, *_MOVING), 0.0)
    for name, value in _SAMPLE.findall(text):
        if name in sums:
            try:
                sums[name] += float(value)
            except ValueError:
                continue
    return Load(int(sums[_RUNNING]), tuple(sums[name] for name in _MOVING))


def watch(process: ServerProcess, client: Client, stall_seconds: float) -> None:
    """Return never: raise ServerExited when the server ends, Stalled after ``stall_seconds`` without progress."""
    poll = min(_POLL, stall_seconds / 5)
    last: Load | None = None
    since = time.monotonic()
    while True:
        process.check(wait=poll)
        try:
            load = read_load(client.metrics(min(_METRICS_TIMEOUT, stall_seconds)))
        except RequestFailed as error:
            why = f"it answers nothing ({error.message})"
        else:
            why = f"{load.running} requests run and no counter moves"
            if load.running == 0 or last is None or load.moving != last.moving:
                since = time.monotonic()
            last = load
        if time.monotonic() - since > stall_seconds:
            process.check(wait=_LAST_WORDS)
            raise Stalled(
                f"the server made no progress for {stall_seconds:.0f} s: {why}",
                hint="the incident folder holds stacks and the log's end; `glm5deploy doctor --nccl` tests the links",
            )


@dataclass(slots=True)
class Restarts:
    """How often a server may be started again: ``most`` times in a row, with twice the wait each time.

    A server that was ready for ``steady`` seconds counts as well, and the row begins anew.
    """

    most: int
    first_wait: float = 5.0
    longest_wait: float = 300.0
    steady: float = 1800.0
    clock: Callable[[], float] = time.monotonic
    was_ready: bool = field(default=False, init=False)
    _used: int = field(default=0, init=False)
    _ready_at: float | None = field(default=None, init=False)

    def ready(self) -> None:
        self.was_ready = True
        self._ready_at = self.clock()

    def next_wait(self) -> float | None:
        """Seconds to wait before the next start; None when it is time to give up."""
        if self._ready_at is not None and self.clock() - self._ready_at >= self.steady:
            self._used = 0
        self._ready_at = None
        if self._used >= self.most:
            return None
        self._used += 1
        return min(self.first_wait * 2.0 ** (self._used - 1), self.longest_wait)
