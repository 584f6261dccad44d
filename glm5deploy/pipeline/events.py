"""What happens during a run, as values; who shows or stores them is somebody else's business."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from glm5deploy.progress import Progress

Kind = Literal["up-to-date", "started", "checkpoint", "progress", "note", "warning", "finished", "failed"]


@dataclass(frozen=True, slots=True)
class Event:
    """``checkpoint`` marks a point where work became durable: killing the process there must lose nothing."""

    stage: str
    kind: Kind
    message: str = ""
    data: Mapping[str, object] = field(default_factory=dict)
    progress: Progress | None = None


EventSink = Callable[[Event], None]


class Events:
    """Hands every event to every sink, one at a time, also when stages report from threads."""

    def __init__(self, *sinks: EventSink) -> None:
        self._sinks = list(sinks)
        self._lock = threading.RLock()

    def emit(self, event: Event) -> None:
        with self._lock:
            for sink in self._sinks:
                sink(event)


class StageEvents:
    """The part of :class:`Events` that one stage sees: its name is filled in."""

    def __init__(self, events: Events, stage: str) -> None:
        self._events = events
        self._stage = stage
        self.changed = False
        """Whether a checkpoint was reported: something on disk is no longer as it was."""

    def _emit(self, kind: Kind, message: str, data: Mapping[str, object], progress: Progress | None = None) -> None:
        self._events.emit(Event(self._stage, kind, message, dict(data), progress))

    def checkpoint(self, message: str, **data: object) -> None:
        """Something is durable now: a shard verified, a journal entry written, a file renamed."""
        self.changed = True
        self._emit("checkpoint", message, data)

    def note(self, message: str, **data: object) -> None:
        self._emit("note", message, data)

    def warning(self, message: str, **data: object) -> None:
        self._emit("warning", message, data)

    def progress(self, progress: Progress) -> None:
        """A :data:`~glm5deploy.progress.ProgressSink`."""
        self._emit("progress", "", {}, progress)
