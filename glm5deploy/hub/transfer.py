"""One shard from a hub to its final name: resumed, watched, hashed, and proved before it is called a shard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.errors import HubError
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.faults import Policy, RateWatch, TransferFault
from glm5deploy.hub.hashing import FileHash, Stopped, differing_spans, hash_into
from glm5deploy.hub.partial import Partial
from glm5deploy.hub.source import Body, Source
from glm5deploy.sizes import human_bytes

_STALLS_BEFORE_SWITCH = 2

Report = Callable[[RemoteFile, int, str], None]
"""Called with the file, its bytes so far and a short note ("", "hashing", "waiting 4 s: …")."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A shard in its place. ``notes`` are sentences about what went wrong on the way and was put right."""

    path: Path
    prefixes: tuple[str, ...]
    notes: tuple[str, ...] = ()


class Transfer:
    """Moves one file. ``sources`` in order of preference: repeated stalls of one pass to the next."""

    def __init__(
        self, destination: Path, file: RemoteFile, sources: Sequence[Source], policy: Policy, stop: threading.Event
    ) -> None:
        self._destination, self._file, self._policy, self._stop = destination, file, policy, stop
        self._sources = [source for source in sources if source.offers(file)]
        self._notes: list[str] = []
        self._hasher = FileHash(file)
        self._faults = self._stalls = self._gained = self._restarts = 0

    def run(self, report: Report) -> Arrived:
        """Bring the file; on a hash mismatch bring it once more from the start.

        :raises HubError: the faults did not end, or the content was wrong twice.
        :raises Stopped: ``stop`` was set; everything that arrived is kept.
        :raises OSError: the destination cannot be written; everything that arrived is kept.
        """
        final, second = self._destination / self._file.path, False
        while True:
            partial = Partial(self._destination, self._file)
            second = second or partial.wrong  # the sidecar knows of another process's attempt
            try:
                hasher = self._receive(partial, report)
                if hasher.matches():
                    partial.complete(final)
                    break
                partial.set_aside()
                if second:
                    raise HubError(
                        f"{self._file.path}: the content was wrong twice, its hash is {hasher.hexdigest()}, "
                        f"the hub's listing says {hasher.expected}",
                        hint="try --transport https or another network; a proxy may be altering the bytes",
                    )
                second = True
                self._note(f"{self._file.name}: hash mismatch, fetching this shard once more")
            finally:
                partial.close()
        if second and partial.aside.exists():  # one that stands there otherwise is of another commit's content
            spans = describe_spans(differing_spans(partial.aside, final))
            self._note(f"{self._file.name}: the first copy differed in {spans}")
        return Arrived(final, tuple(hasher.prefixes), tuple(self._notes))

    def _receive(self, partial: Partial, report: Report) -> FileHash:
        """Fill the partial to the file's size; returns the hash of all of it."""
        file = self._file
        hasher = self._hasher = FileHash(file)
        # The running hash cannot be stored, and bytes from before a crash have to be proved anyway.
        hash_into(hasher, partial.path, partial.offset, report=lambda n: report(file, n, "hashing"), stop=self._stop)
        while partial.offset < file.size:
            self._gained, source = 0, self._sources[0]
            try:
                with source.open(file, partial.offset, partial.etag) as body:
                    self._take(body, partial, report)
                if not self._gained:
                    raise TransferFault("the storage sent nothing")
                self._faults = 0
            except TransferFault as fault:
                self._after(fault, source, partial.offset, report)
        return self._hasher

    def _take(self, body: Body, partial: Partial, report: Report) -> None:
        """Write one answer's bytes to the partial. A whole file instead of a range is skipped or starts it over."""
        file, skip = self._file, 0
        if body.start < partial.offset:
            if body.etag is not None and body.etag == partial.etag:
                skip = partial.offset - body.start  # the range was ignored, the content is the same
            else:
                self._start_over(partial)
        elif partial.offset and _changed(partial.etag, body.etag):
            self._start_over(partial)
            raise TransferFault("the storage sent a range of other content", renew=True)
        if body.etag is not None:
            partial.remember(body.etag)
        watch = RateWatch(self._policy.stall_rate, self._policy.stall_seconds)
        for data in body.chunks:
            if self._stop.is_set():
                raise Stopped
            slow = watch.add(len(data))
            view = memoryview(data)[min(skip, len(data)) :]
            skip -= len(data) - len(view)
            if partial.offset + len(view) > file.size:
                raise TransferFault(f"the storage sends more than the {file.size} bytes of the listing", renew=True)
            partial.append(view)
            self._hasher.update(view)
            self._gained += len(view)
            report(file, partial.offset, "")
            if slow and partial.offset < file.size:
                rate = human_bytes(self._policy.stall_rate)
                raise TransferFault(f"slower than {rate}/s for {self._policy.stall_seconds:g} s", stalled=True)

    def _start_over(self, partial: Partial) -> None:
        """Drop what came of content that the storage has no more; not for ever, whatever comes after each time."""
        self._restarts += 1
        if self._restarts > self._policy.retries:
            raise HubError(
                f"{self._file.path}: the storage changed it or began it from byte 0 {self._restarts} times",
                hint="try --transport https, another network, or again later",
            )
        self._note(f"{self._file.name}: changed in the storage, starting it over from byte 0")
        partial.restart()
        self._hasher = FileHash(self._file)

    def _after(self, fault: TransferFault, source: Source, offset: int, report: Report) -> None:
        """Count the fault, switch transports or renew the URL, and wait; raises when there is no point in going on."""
        self._faults = 1 if self._gained else self._faults + 1
        self._stalls += fault.stalled
        if self._faults > self._policy.retries:
            raise HubError(
                f"{self._file.path}: {fault.reason}, the {self._faults}th fault in a row; "
                f"{human_bytes(offset)} of {human_bytes(self._file.size)} are kept",
                hint="run fetch again to go on from there",
            ) from fault
        switch = len(self._sources) > 1 and (self._stalls >= _STALLS_BEFORE_SWITCH or self._faults >= 2)
        if switch:
            self._sources.pop(0)
            self._stalls = 0
            self._note(f"{self._file.name}: {source.name}: {fault.reason}; going on over {self._sources[0].name}")
        elif fault.renew or fault.stalled:
            source.renew(self._file)
        # An expired URL is ordinary in a long transfer: the first time there is nothing to wait for.
        at_once = switch or (fault.renew and fault.wait is None and self._faults == 1)
        wait = 0.0 if at_once else self._policy.wait_after(self._faults) if fault.wait is None else fault.wait
        report(self._file, offset, f"{fault.reason}; again in {wait:.0f} s")
        if self._stop.wait(wait):
            raise Stopped

    def _note(self, note: str) -> None:
        self._notes.append(note)


def _changed(known: str | None, found: str | None) -> bool:
    """Both ETags are strong, and they name different content."""
    return known is not None and found is not None and not found.startswith("W/") and known != found


def describe_spans(spans: Sequence[tuple[int, int]]) -> str:
    """``bytes 0-1048575, …``, the first few."""
    shown = ", ".join(f"{start}-{end - 1}" for start, end in spans[:3])
    return f"bytes {shown}" + (f" and {len(spans) - 3} more places" if len(spans) > 3 else "")
