"""All shards of a plan into a folder: adopted or transferred, several at once, proved, and checked as a set."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from glm5deploy.errors import DeployError, HubError
from glm5deploy.hub.adopt import find_copy, take_over
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.client import Hub
from glm5deploy.hub.disk import explain_write_error, require_room
from glm5deploy.hub.faults import Policy
from glm5deploy.hub.hashing import Stopped, differing_spans
from glm5deploy.hub.meter import Meter
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.records import STATE_FOLDER, state_folder
from glm5deploy.hub.source import Source
from glm5deploy.hub.transfer import Transfer, describe_spans
from glm5deploy.hub.verify import check_file, check_files, is_verified, record_verified, shard_states
from glm5deploy.progress import ProgressSink, ignore_progress

Notify = Callable[[str], None]


@dataclass
class Download:
    """One run of fetching a plan. ``later_bytes`` is room that must be left for the stage that follows.

    ``note`` gets sentences for the user, ``proved`` each shard that is verified and durable. Both are called from
    worker threads.
    """

    hub: Hub
    plan: FetchPlan
    destination: Path
    policy: Policy = field(default_factory=Policy)
    adopt: Path | None = None
    later_bytes: int = 0
    progress: ProgressSink = ignore_progress
    note: Notify = lambda _: None
    proved: Callable[[RemoteFile], None] = lambda _: None
    _asides: dict[str, Path] = field(default_factory=dict, init=False)

    def run(self) -> tuple[Path, ...]:
        """Bring everything that is not verified yet; returns the shards' paths in order.

        :raises DiskFullError: before or during the transfer; partial shards are kept.
        :raises HubError: offline with shards missing, or the hub failed for good.
        :raises FileFormatError: the proved files are not a GGUF set.
        """
        state_folder(self.destination)
        with _folder_lock(self.destination):
            missing = self._settle()
            if missing:
                if self.hub.offline:
                    names = ", ".join(file.path for file in missing[:3])
                    raise HubError(
                        f"working offline, and {len(missing)} shards are not here: {names}",
                        hint="allow access to the hub once, or name a folder that has them with --from",
                    )
                require_room(self.destination, self._missing_bytes(), self.later_bytes)
                self._transfer(missing)
        self._check_set()
        return self.plan.paths(self.destination)

    def _missing_bytes(self) -> int:
        return self.plan.size - sum(state.present for state in shard_states(self.plan, self.destination))

    def _settle(self) -> list[RemoteFile]:
        """Prove what lies under a shard's name, adopt what can be found elsewhere; returns what has to be fetched."""
        meter = Meter(self.plan, self.destination, self.progress)
        open_ = [file for file in self.plan.files if not is_verified(self.destination, file)]
        there = [file for file in open_ if (self.destination / file.path).exists()]
        verdicts = check_files(self.plan, self.destination, there, report=lambda f, n: meter.report(f, n, "hashing"))
        sound = {verdict.file.path for verdict in verdicts if not verdict.problem}
        for verdict in verdicts:
            if verdict.problem:
                aside = self._asides[verdict.file.path] = self._set_aside(verdict.file)
                self.note(f"{verdict.detail}; moved to {aside}")
            else:
                self.proved(verdict.file)
        missing = [file for file in open_ if file.path not in sound]
        return [file for file in missing if self.adopt is None or not self._adopt(file, self.adopt, meter)]

    def _adopt(self, file: RemoteFile, folder: Path, meter: Meter) -> bool:
        found = find_copy(file, folder, report=lambda n: meter.report(file, n, "hashing"))
        if found is None:
            return False
        source, prefixes = found
        temporary = self.destination / STATE_FOLDER / f"{file.path}.adopted"
        try:
            how = take_over(source, self.destination / file.path, temporary)
        except OSError as error:
            raise explain_write_error(error, self.destination, file.size) from error
        if how == "copy" and check_file(self.plan, self.destination, file).problem:
            self.note(f"{file.name}: the copy of {source} is damaged; moved to {self._set_aside(file)}")
            return False
        record_verified(self.destination, file, self.plan.commit, prefixes)
        self.note(f"{file.name}: taken over from {source} ({how})")
        self.proved(file)
        return True

    def _set_aside(self, file: RemoteFile) -> Path:
        """Move a file that is not the listed content out of the way; it may be the user's, so it is kept."""
        folder = self.destination / STATE_FOLDER / "aside"
        number = 1
        while (target := folder / f"{file.path}.{number}").exists():
            number += 1
        target.parent.mkdir(parents=True, exist_ok=True)
        (self.destination / file.path).replace(target)
        return target

    def _transfer(self, missing: list[RemoteFile]) -> None:
        work: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in missing:
            work.put(file)
        meter = Meter(self.plan, self.destination, self.progress)
        stop, errors = threading.Event(), list[Exception]()

        def worker(sources: list[Source]) -> None:
            try:
                while not stop.is_set():
                    self._bring(work.get_nowait(), sources, meter, stop)
            except (queue.Empty, Stopped):
                return
            except Exception as error:  # handed to the main thread, which raises it
                errors.append(error)
                stop.set()

        with ExitStack() as stack:
            sources = self._sources(stack)
            # Daemons: a thread in a blocking read must not keep an interrupted program alive.
            count = max(1, min(self.policy.parallel, len(missing)))
            threads = [threading.Thread(target=worker, args=(sources,), daemon=True) for _ in range(count)]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    while thread.is_alive():
                        thread.join(0.2)
            except BaseException:
                stop.set()
                for thread in threads:
                    thread.join(1.0)
                raise
        if errors:
            raise errors[0]

    def _sources(self, stack: ExitStack) -> list[Source]:
        from glm5deploy.hub.ranges import HttpsSource
        from glm5deploy.hub.xet import XetSource, xet_available

        arguments = (self.hub, self.plan.repo, self.plan.commit, self.policy)
        sources: list[Source] = []
        wanted = self.policy.transport
        if wanted in ("auto", "xet") and any(file.xet_hash for file in self.plan.files):
            if xet_available():
                sources.append(XetSource(*arguments))
            elif wanted == "xet":
                raise DeployError("xet is not available", hint="install hf_xet and unset HF_HUB_DISABLE_XET")
        # HTTPS stays behind an explicit xet as well: it is what brings files that are not in xet storage.
        sources.append(stack.enter_context(HttpsSource(*arguments)))
        return sources

    def _bring(self, file: RemoteFile, sources: list[Source], meter: Meter, stop: threading.Event) -> None:
        from glm5deploy.gguf_files.header import read_header

        try:
            arrived = Transfer(self.destination, file, sources, self.policy, stop).run(meter.report)
            record_verified(self.destination, file, self.plan.commit, arrived.prefixes)
            self._compare_with_aside(file, arrived.path)
        except OSError as error:
            raise explain_write_error(error, self.destination, self._missing_bytes()) from error
        for note in arrived.notes:
            self.note(note)
        read_header(arrived.path)
        self.proved(file)

    def _compare_with_aside(self, file: RemoteFile, path: Path) -> None:
        """Say which bytes of a damaged shard were wrong, now that the right ones are here."""
        if damaged := self._asides.get(file.path):
            self.note(f"{file.name}: {damaged} differs in {describe_spans(differing_spans(damaged, path))}")

    def _check_set(self) -> None:
        """The proved files must also be one complete GGUF set by what stands in their headers."""
        from glm5deploy.gguf_files.shards import ShardSet

        ShardSet.open(self.plan.paths(self.destination)[0], check_mix=False)


@contextmanager
def _folder_lock(destination: Path) -> Iterator[None]:
    """Two processes must not append to the same partial file."""
    handle = os.open(destination / STATE_FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeployError(
                f"another process is fetching into {destination}", hint="wait for it, or choose another --workdir"
            ) from None
        yield
    finally:
        os.close(handle)
