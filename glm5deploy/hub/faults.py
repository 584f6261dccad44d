"""What may go wrong in a transfer without ending it, and how long to wait then."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_LONGEST_WAIT = 600.0


class TransferFault(Exception):
    """A passing fault: the transfer goes on from where it stood.

    ``wait`` is what the server asked for, in seconds; ``renew`` asks for a new signed URL; ``stalled`` marks a
    transport that went silent or slow.
    """

    def __init__(self, reason: str, *, wait: float | None = None, renew: bool = False, stalled: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait = wait
        self.renew = renew
        self.stalled = stalled


@dataclass(frozen=True, slots=True)
class Policy:
    """How a transfer behaves. Rates are bytes a second, times seconds.

    A connection that brings fewer than ``stall_rate`` bytes a second over ``stall_seconds`` is dropped. ``retries``
    counts faults in a row that brought nothing. ``window`` bounds one ranged request: content networks refuse single
    answers of more than 50 GB, and a signed URL outlives neither.
    """

    parallel: int = 4
    transport: str = "auto"
    stall_rate: int = 64 * 1024
    stall_seconds: float = 30.0
    retries: int = 8
    window: int = 8 << 30
    backoff: float = 1.0
    longest_backoff: float = 60.0

    def wait_after(self, faults: int) -> float:
        """Exponential with full jitter on the upper half: many clients must not come back at the same moment."""
        ceiling = min(self.longest_backoff, self.backoff * 2.0 ** min(faults - 1, 16))
        return float(ceiling * random.uniform(0.5, 1.0))


class RateWatch:
    """Notices a connection that is alive but useless: fewer than ``rate`` bytes a second over ``seconds``."""

    def __init__(self, rate: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._needed = rate * seconds
        self._seconds = seconds
        self._clock = clock
        self._total = 0
        self._marks = deque([(clock(), 0)])

    def add(self, count: int) -> bool:
        """Count bytes; True when the last ``seconds`` brought too few."""
        now = self._clock()
        self._total += count
        if now - self._marks[-1][0] >= self._seconds / 8:
            self._marks.append((now, self._total))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()
        begin, before = self._marks[0]
        return now - begin >= self._seconds and self._total - before < self._needed * (now - begin) / self._seconds


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from a ``Retry-After`` header (a number or a date), at most ten minutes; None without one."""
    value = (headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if not value:
        return None
    if value.isdigit():
        return min(float(value), _LONGEST_WAIT)
    try:
        moment = parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError):
        return None
    return min(max(0.0, moment - time.time()), _LONGEST_WAIT)
