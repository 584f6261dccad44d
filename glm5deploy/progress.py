"""How long-running work reports where it stands, whatever shows it.

Work that takes time accepts a :data:`ProgressSink` and calls it with absolute numbers, so that a lost report costs
nothing. Sinks are called from worker threads and must be quick; rate and ETA are the viewer's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Progress:
    """``done`` of ``total`` ``unit`` of the piece of work called ``task`` (a shard's file name, "hashing", …).

    In seconds it is a wait: ``total`` is when it is given up.
    """

    task: str
    done: int
    total: int
    unit: Literal["bytes", "items", "seconds"] = "bytes"
    note: str = ""


ProgressSink = Callable[[Progress], None]


def ignore_progress(_: Progress) -> None:
    """The sink for callers that do not watch."""
