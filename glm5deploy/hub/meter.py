"""Progress of several shards as one: each shard's bytes and the total, not more often than anyone can look."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.verify import shard_states
from glm5deploy.progress import Progress, ProgressSink

_INTERVAL = 0.1

TOTAL = "total"
"""The task name under which the sum over all shards is reported."""


class Meter:
    """Thread-safe. Reports a shard at most every tenth of a second, at its end, and whenever its note changes."""

    def __init__(self, plan: FetchPlan, destination: Path, sink: ProgressSink) -> None:
        self._plan, self._sink = plan, sink
        self._lock = threading.Lock()
        self._done = {state.file.path: state.present for state in shard_states(plan, destination)}
        self._last: dict[str, tuple[float, str]] = {}

    def report(self, file: RemoteFile, done: int, note: str) -> None:
        now = time.monotonic()
        with self._lock:
            when, before = self._last.get(file.path, (0.0, ""))
            if now - when < _INTERVAL and done < file.size and note == before:
                return
            self._last[file.path] = (now, note)
            # Reading again what was there before is not progress of the whole.
            if note != "hashing":
                self._done[file.path] = done
            total = sum(self._done.values())
        self._sink(Progress(file.name, done, file.size, note=note))
        self._sink(Progress(TOTAL, total, self._plan.size))
