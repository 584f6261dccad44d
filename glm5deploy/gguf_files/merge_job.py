"""One merge under way: its partial file, its journal, its workers."""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import ExitStack
from pathlib import Path

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.files import sync_folder
from glm5deploy.gguf_files.check import check_written
from glm5deploy.gguf_files.consume import Consumption
from glm5deploy.gguf_files.copier import Checkpoint, Copier
from glm5deploy.gguf_files.identity import Identity, identity_of, mark_sources
from glm5deploy.gguf_files.journal import Journal, JournalState
from glm5deploy.gguf_files.linux_files import reserve
from glm5deploy.gguf_files.merge_options import MergeOptions, MergeResult
from glm5deploy.gguf_files.merge_plan import Copy, Plan
from glm5deploy.gguf_files.open_file import write_all
from glm5deploy.gguf_files.segments import whole_blocks
from glm5deploy.gguf_files.space import larger_than_cache
from glm5deploy.gguf_files.transfer import BUFFERED_CHUNK, DIRECT_CHUNK, Transfer
from glm5deploy.progress import ProgressSink


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
        self._identities: list[Identity] = []
        self._sha256: dict[str, str] = {}
        self._position = 0
        self._resumed_at = 0
        self._stop = threading.Event()

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
            copier = Copier(
                self.plan,
                transfer,
                journal,
                self.options,
                cloned,
                self._position,
                self._verify,
                self._consumption,
                self._sha256,
                self.output.name,
                self._progress,
                self._checkpoint,
                self._stop.set,
            )
            copier.run()
            self._finish(copier, descriptor)
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

    def began_with(self, state: JournalState) -> bool:
        """Whether the merge of ``state`` began with the shards that are there now.

        Raises :class:`UsageError` if not, once some of them were released: then there is no beginning anew.
        """
        if state.consume and self._consumption is not None:
            self._consumption.check_unchanged(state.identities, journal_path(self.output))
            return True
        return state.identities == self._identify()

    def _identify(self) -> list[Identity]:
        return [identity_of(Path(source.path)) for source in self.plan.sources]

    def _resume(self, state: JournalState | None, descriptor: int) -> int:
        """Take over what an earlier run made durable; its offset, or 0 to begin anew."""
        if state is None or state.digest != self.plan.digest or (self._verify and not state.verify):
            return 0
        if (self.options.consume and not state.consume) or not self.began_with(state):
            return 0
        header = self.plan.header
        if os.fstat(descriptor).st_size != self.plan.size or os.pread(descriptor, len(header), 0) != header:
            if state.consume:
                raise FileFormatError(f"{partial_path(self.output)}: was changed since the merge was interrupted")
            return 0
        self._identities = state.identities
        self._verify = state.verify
        self._sha256 = dict(state.sha256)
        self._position = min(max(state.position, len(header)), self.plan.size)
        return self._position

    def _begin(self, descriptor: int) -> None:
        """A file of the final size with its header in place, and then a journal that says so."""
        journal_path(self.output).unlink(missing_ok=True)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, self.plan.size)
        write_all(descriptor, memoryview(self.plan.header), 0)
        os.fsync(descriptor)
        self._identities = self._identify()
        consume = self._consumption is not None
        state = JournalState(self.plan.describe(), self.plan.digest, self._identities, consume, self._verify)
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
            stopped=self._stop.is_set,
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

    def _finish(self, copier: Copier, descriptor: int) -> None:
        for offset, length in self.plan.zeros:
            write_all(descriptor, memoryview(bytes(length)), offset)
        mark_sources(descriptor, self._identities)
        os.fsync(descriptor)
        check_written(partial_path(self.output), self.plan)
        if self._verify and self._consumption is None:
            copier.verify_all()
        self._checkpoint("whole")
        partial_path(self.output).replace(self.output)
        sync_folder(self.output.parent)
        self._checkpoint("renamed")


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
