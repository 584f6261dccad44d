"""One merge under way: its partial file, its journal, its workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.gguf_files.check import check_written
from glm5deploy.gguf_files.consume import Consumption
from glm5deploy.gguf_files.journal import Journal, JournalState, sync_folder
from glm5deploy.gguf_files.linux_files import reserve
from glm5deploy.gguf_files.merge_options import MergeOptions, MergeResult
from glm5deploy.gguf_files.merge_plan import Copy, Plan
from glm5deploy.gguf_files.segments import Segment, batches, run_segments, tensor_segments, whole_blocks
from glm5deploy.gguf_files.space import larger_than_cache
from glm5deploy.gguf_files.transfer import BUFFERED_CHUNK, DIRECT_CHUNK, Stopped, Transfer
from glm5deploy.progress import Progress, ProgressSink

Checkpoint = Callable[[str], None]

_SECONDS_BETWEEN_REPORTS = 0.25


class MergeJob:
    """Carries ``plan`` out into ``output``; all state that outlives the process is in the two files beside it."""

    def __init__(
        self, plan: Plan, output: Path, options: MergeOptions, progress: ProgressSink, checkpoint: Checkpoint
    ) -> None:
        self.plan = plan
        self.output = output
        self.options = options
        self._progress = progress
        self._checkpoint = checkpoint
        self._consumption = Consumption(plan) if options.consume else None
        self._verify = options.verify or options.consume
        self._sha256: dict[str, str] = {}
        self._position = 0
        self._resumed_at = 0
        self._stop = False

    def run(self, state: JournalState | None) -> MergeResult:
        """Copy what ``state`` says is missing, then give the file its name."""
        partial = partial_path(self.output)
        with ExitStack() as stack:
            descriptor = _locked(partial)
            stack.callback(os.close, descriptor)
            self._resumed_at = self._resume(state, descriptor)
            if self._consumption is not None:
                self._consumption.check(self.output, self.options.journal_bytes)
            if not self._resumed_at:
                self._begin(descriptor)
            journal = Journal.resume(journal_path(self.output))
            stack.callback(journal.close)
            transfer = self._open(partial)
            stack.callback(transfer.close)
            cloned = self._clone(transfer)
            if self._consumption is None:
                self._reserve(descriptor, cloned, keep=bool(self._resumed_at))
            else:
                done = [c for c in self.plan.tensors.values() if c.offset + c.length <= self._position]
                for number in self._consumption.release(done, self._position):
                    transfer.forget(number)
            self._copy(transfer, journal, cloned)
            self._finish(transfer, descriptor)
        self.clean_up()
        return MergeResult(
            self.output,
            self.plan.size,
            "direct" if transfer.direct else "buffered",
            transfer.moved,
            sum(copy.length for copy in cloned),
            self._resumed_at,
            self._sha256,
        )

    def clean_up(self) -> None:
        """Remove what a ``--consume`` merge left of the shards, then the journal: the last trace of a merge."""
        if self._consumption is not None:
            self._consumption.finish()
        journal_path(self.output).unlink(missing_ok=True)
        sync_folder(self.output.parent)
        self._checkpoint("finished")

    def _resume(self, state: JournalState | None, descriptor: int) -> int:
        """Take over what an earlier run made durable; its offset, or 0 to begin anew."""
        if state is None or state.digest != self.plan.digest or (self._verify and not state.verify):
            return 0
        if not state.consume and (self.options.consume or state.identities != self._identities()):
            return 0
        header = self.plan.header
        if os.fstat(descriptor).st_size != self.plan.size or os.pread(descriptor, len(header), 0) != header:
            if state.consume:
                raise FileFormatError(f"{partial_path(self.output)}: was changed since the merge was interrupted")
            return 0
        self._verify = state.verify
        self._sha256 = dict(state.sha256)
        self._position = max(state.position, len(header))
        return self._position

    def _identities(self) -> list[list[int]]:
        stats = [Path(source.path).stat() for source in self.plan.sources]
        return [[stat.st_size, stat.st_ino, stat.st_mtime_ns] for stat in stats]

    def _begin(self, descriptor: int) -> None:
        """A file of the final size with its header in place, and then a journal that says so."""
        journal_path(self.output).unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, self.plan.size)
        os.pwrite(descriptor, self.plan.header, 0)
        os.fsync(descriptor)
        consume = self._consumption is not None
        state = JournalState(self.plan.describe(), self.plan.digest, self._identities(), consume, self._verify)
        Journal.create(journal_path(self.output), state).close()
        self._position = len(self.plan.header)
        self._checkpoint("begun")

    def _open(self, partial: Path) -> Transfer:
        options = self.options
        direct = options.mode == "direct" or (options.mode == "auto" and larger_than_cache(self.plan.size))
        return Transfer(
            self._consumption.located() if self._consumption else [Path(s.path) for s in self.plan.sources],
            partial,
            direct=direct,
            chunk_bytes=options.chunk_bytes or (DIRECT_CHUNK if direct else BUFFERED_CHUNK),
            stopped=lambda: self._stop,
        )

    def _clone(self, transfer: Transfer) -> list[Copy]:
        candidates = (whole_blocks(copy, self._position) for copy in self.plan.copies if self.options.reflink)
        return [copy for copy in candidates if copy is not None and transfer.clone(copy)]

    def _reserve(self, descriptor: int, cloned: list[Copy], *, keep: bool) -> None:
        """Allocate everything that is not shared, so that a full disk shows before hours of copying."""
        begin = 0
        try:
            for copy in (*cloned, Copy(0, 0, self.plan.size, 0)):
                reserve(descriptor, begin, copy.offset - begin)
                begin = copy.offset + copy.length
        except OSError:
            if not keep:
                partial_path(self.output).unlink()
                journal_path(self.output).unlink()
            raise

    def _copy(self, transfer: Transfer, journal: Journal, cloned: list[Copy]) -> None:
        if self._verify:
            segments = tensor_segments(self.plan, self._position)
        else:
            segments = run_segments(self.plan, self._position, self.options.segment_bytes, cloned)
        ahead = 1 if self._consumption is None else 0
        waiting: deque[tuple[list[Segment], list[Future[str]]]] = deque()
        with ThreadPoolExecutor(self.options.threads, thread_name_prefix="merge") as pool:
            try:
                for batch in batches(segments, self.options.journal_bytes, by_source=self._consumption is not None):
                    waiting.append((batch, [pool.submit(self._copy_one, transfer, s, cloned) for s in batch]))
                    if len(waiting) > ahead:
                        self._settle(transfer, journal, *waiting.popleft())
                while waiting:
                    self._settle(transfer, journal, *waiting.popleft())
            except BaseException:
                self._stop = True
                pool.shutdown(cancel_futures=True)
                raise

    def _copy_one(self, transfer: Transfer, segment: Segment, cloned: list[Copy]) -> str:
        """Copy a segment; the sha256 of a whole tensor, else nothing."""
        copy = segment.copy
        if not segment.tensor:
            transfer.copy(copy)
            return ""
        digest = hashlib.sha256()
        if any(c.offset <= copy.offset and segment.end <= c.offset + c.length for c in cloned):
            transfer.read_source(copy, digest)
        else:
            transfer.copy(copy, digest)
        return digest.hexdigest()

    def _settle(self, transfer: Transfer, journal: Journal, batch: list[Segment], futures: list[Future[str]]) -> None:
        """Wait for a batch, flush it, record it, and only then let go of what it was copied from."""
        while wait(futures, _SECONDS_BETWEEN_REPORTS).not_done:
            self._report(transfer)
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda e: isinstance(e, Stopped)):
            raise error
        transfer.sync()
        digests = {s.tensor: f.result() for s, f in zip(batch, futures, strict=True) if s.tensor}
        self._sha256.update(digests)
        if self._consumption is not None:
            for name in digests:
                self._read_back(transfer, name)
        self._position = batch[-1].end
        journal.reached(self._position, digests)
        self._checkpoint(f"recorded {self._position}")
        if self._consumption is not None:
            for number in self._consumption.release([segment.copy for segment in batch], self._position):
                transfer.forget(number)
            self._checkpoint(f"released {self._position}")
        self._report(transfer)

    def _read_back(self, transfer: Transfer, name: str) -> None:
        copy, digest = self.plan.tensors[name], hashlib.sha256()
        transfer.read_back(copy.offset, copy.length, digest)
        if digest.hexdigest() != self._sha256[name]:
            raise FileFormatError(
                f"{partial_path(self.output)}: at offset {copy.offset}: tensor {name!r} reads back differently from "
                "what was written",
                hint="the disk or the memory is faulty; the shards are untouched from this tensor on",
            )

    def _finish(self, transfer: Transfer, descriptor: int) -> None:
        for offset, length in self.plan.zeros:
            os.pwrite(descriptor, bytes(length), offset)
        os.fsync(descriptor)
        check_written(partial_path(self.output), self.plan)
        if self._verify and self._consumption is None:
            with ThreadPoolExecutor(self.options.threads) as pool:
                for future in [pool.submit(self._read_back, transfer, name) for name in self.plan.tensors]:
                    future.result()
        self._checkpoint("whole")
        partial_path(self.output).replace(self.output)
        sync_folder(self.output.parent)
        self._checkpoint("renamed")

    def _report(self, transfer: Transfer) -> None:
        done = min(max(self._position, self._resumed_at + transfer.moved), self.plan.size)
        self._progress(Progress(self.output.name, done, self.plan.size))


def partial_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def journal_path(output: Path) -> Path:
    return output.with_name(output.name + ".partial.journal")


def _locked(partial: Path) -> int:
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DeployError(f"{partial}: another merge is writing this file", hint="wait until it is finished") from None
    return descriptor
