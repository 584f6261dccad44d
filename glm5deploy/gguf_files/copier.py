"""The copying itself: workers, batches, and what has to be on the disk before what."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.consume import Consumption
from glm5deploy.gguf_files.journal import Journal
from glm5deploy.gguf_files.merge_options import MergeOptions
from glm5deploy.gguf_files.merge_plan import Copy, Plan
from glm5deploy.gguf_files.segments import Segment, batches, run_segments, tensor_segments
from glm5deploy.gguf_files.transfer import Stopped, Transfer
from glm5deploy.progress import Progress, ProgressSink

Checkpoint = Callable[[str], None]

_SECONDS_BETWEEN_REPORTS = 0.25


@dataclass
class Copier:
    """Copies what ``plan`` has from ``position`` on, except the ranges in ``cloned``.

    While a batch is flushed and recorded the next one is copied already; with a ``consumption`` one batch follows the
    other, since each is read back and its shards are released before the next needs their room. ``sha256`` collects
    the tensors' digests if ``verify`` is set.
    """

    plan: Plan
    transfer: Transfer
    journal: Journal
    options: MergeOptions
    cloned: list[Copy]
    position: int
    verify: bool
    consumption: Consumption | None
    sha256: dict[str, str]
    task: str
    progress: ProgressSink
    checkpoint: Checkpoint
    stop: Callable[[], None]
    _begun_at: int = field(init=False)

    def __post_init__(self) -> None:
        self._begun_at = self.position

    def run(self) -> None:
        ahead = 1 if self.consumption is None else 0
        waiting: deque[tuple[list[Segment], list[Future[str]]]] = deque()
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="merge") as pool:
            try:
                for batch in batches(self._segments(), self.options.journal_bytes, by_source=ahead == 0):
                    waiting.append((batch, [pool.submit(self._copy, segment) for segment in batch]))
                    if len(waiting) > ahead:
                        self._settle(*waiting.popleft())
                while waiting:
                    self._settle(*waiting.popleft())
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise

    def verify_all(self) -> None:
        """Read every tensor back from the disk and compare it with what was read from the shards."""
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="verify") as pool:
            futures = [pool.submit(self._read_back, name) for name in self.plan.tensors]
            for number, future in enumerate(futures, start=1):
                future.result()
                self.progress(Progress("verifying tensors", number, len(futures), "items"))

    def _segments(self) -> Iterator[Segment]:
        if self.verify:
            return tensor_segments(self.plan, self.position)
        return run_segments(self.plan, self.position, self.options.segment_bytes, self.cloned)

    def _copy(self, segment: Segment) -> str:
        """Copy a segment; the sha256 of a whole tensor, else nothing."""
        copy = segment.copy
        if not segment.tensor:
            self.transfer.copy(copy)
            return ""
        digest = hashlib.sha256()
        if any(c.offset <= copy.offset and segment.end <= c.offset + c.length for c in self.cloned):
            self.transfer.read_source(copy, digest)
        else:
            self.transfer.copy(copy, digest)
        return digest.hexdigest()

    def _settle(self, batch: list[Segment], futures: list[Future[str]]) -> None:
        """Wait for a batch, flush it, record it, and only then let go of what it was copied from."""
        while wait(futures, _SECONDS_BETWEEN_REPORTS).not_done:
            self._report()
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda e: isinstance(e, Stopped)):
            raise error
        self.transfer.sync()
        digests = {s.tensor: f.result() for s, f in zip(batch, futures, strict=True) if s.tensor}
        self.sha256.update(digests)
        if self.consumption is not None:
            for name in digests:
                self._read_back(name)
        self.position = batch[-1].end
        self.journal.reached(self.position, digests)
        self.checkpoint(f"recorded {self.position}")
        if self.consumption is not None:
            for number in self.consumption.release([segment.copy for segment in batch], self.position):
                self.transfer.forget(number)
            self.checkpoint(f"released {self.position}")
        self._report()

    def _read_back(self, name: str) -> None:
        copy, digest = self.plan.tensors[name], hashlib.sha256()
        self.transfer.read_back(copy.offset, copy.length, digest)
        if digest.hexdigest() != self.sha256[name]:
            raise FileFormatError(
                f"{self.task}: at offset {copy.offset}: tensor {name!r} reads back differently from what was written",
                hint="the disk or the memory is faulty; the shards are untouched from this tensor on",
            )

    def _report(self) -> None:
        done = min(max(self.position, self._begun_at + self.transfer.moved), self.plan.size)
        self.progress(Progress(self.task, done, self.plan.size))
