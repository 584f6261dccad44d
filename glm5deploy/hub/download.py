"""All shards of a plan into a folder: adopted or transferred, several at once, proved, and checked as a set."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from glm5deploy.errors import DeployError, HubError
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.client import Hub
from glm5deploy.hub.disk import explain_write_error, require_room
from glm5deploy.hub.faults import Policy
from glm5deploy.hub.hashing import Stopped, differing_spans
from glm5deploy.hub.meter import Meter
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.records import STATE_FOLDER, state_folder
from glm5deploy.hub.settle import Notify, settle
from glm5deploy.hub.source import Source
from glm5deploy.hub.transfer import Transfer, describe_spans
from glm5deploy.hub.verify import record_verified, shard_states
from glm5deploy.progress import ProgressSink, ignore_progress


@dataclass
class Download:
    """One run of fetching a plan. ``later_bytes`` is room that must be left for the stage that follows.

    ``part`` says that the plan is not a whole set, because other shards are no longer wanted as files.

    ``note`` gets sentences for the user, ``proved`` each shard that is verified and durable. Both are called from
    worker threads.
    """

    hub: Hub
    plan: FetchPlan
    destination: Path
    policy: Policy = field(default_factory=Policy)
    adopt: Path | None = None
    later_bytes: int = 0
    part: bool = False
    progress: ProgressSink = ignore_progress
    note: Notify = lambda _: None
    proved: Callable[[RemoteFile], None] = lambda _: None

    def run(self) -> tuple[Path, ...]:
        """Bring everything that is not verified yet; returns the shards' paths in order.

        :raises DiskFullError: before or during the transfer; partial shards are kept.
        :raises HubError: offline with shards missing, or the hub failed for good.
        :raises FileFormatError: the proved files are not a GGUF set.
        """
        with folder_lock(self.destination):
            meter = Meter(self.plan, self.destination, self.progress)
            settled = settle(self.plan, self.destination, self.adopt, meter, self.note, self.proved)
            if missing := list(settled.missing):
                if self.hub.offline:
                    names = ", ".join(file.path for file in missing[:3])
                    raise HubError(
                        f"working offline, and {len(missing)} shards are not here: {names}",
                        hint="allow access to the hub once, or name a folder that has them with --from",
                    )
                require_room(self.destination, self._missing_bytes(), self.later_bytes)
                self._transfer(missing, settled.asides)
        if not self.part:
            self._check_set()
        return self.plan.paths(self.destination)

    def _missing_bytes(self) -> int:
        return self.plan.size - sum(state.present for state in shard_states(self.plan, self.destination))

    def _transfer(self, missing: list[RemoteFile], asides: Mapping[str, Path]) -> None:
        work: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        for file in missing:
            work.put(file)
        meter = Meter(self.plan, self.destination, self.progress)
        stop, errors = threading.Event(), list[Exception]()

        def worker(sources: list[Source]) -> None:
            try:
                while not stop.is_set():
                    file = work.get_nowait()
                    self._bring(file, sources, meter, stop, asides.get(file.path))
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
                while not stop.is_set() and any(thread.is_alive() for thread in threads):
                    stop.wait(0.1)
            finally:
                stop.set()
                for thread in threads:
                    thread.join(1.0)  # those that still wait for bytes find ``stop`` when they wake
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

    def _bring(
        self, file: RemoteFile, sources: list[Source], meter: Meter, stop: threading.Event, damaged: Path | None
    ) -> None:
        """Fetch one shard; ``damaged`` is the file that had its name before and was found wrong."""
        try:
            arrived = Transfer(self.destination, file, sources, self.policy, stop).run(meter.report)
            record_verified(self.destination, file, self.plan.commit, arrived.prefixes)
            spans = differing_spans(damaged, arrived.path) if damaged else []
        except OSError as error:
            raise explain_write_error(error, self.destination, self._missing_bytes()) from error
        for note in arrived.notes:
            self.note(note)
        if damaged:
            self.note(f"{file.name}: {damaged} differs in {describe_spans(spans)}")
        self.proved(file)

    def _check_set(self) -> None:
        """The proved files must also be one complete GGUF set by what stands in their headers."""
        from glm5deploy.gguf_files.shards import ShardSet

        ShardSet.open(self.plan.paths(self.destination)[0], check_mix=False)


@contextmanager
def folder_lock(destination: Path) -> Iterator[None]:
    """Two processes must not append to the same partial file, nor one withdraw a record that the other writes."""
    state_folder(destination)
    handle = os.open(destination / STATE_FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeployError(
                f"another process is fetching into or verifying {destination}",
                hint="wait for it, or choose another --workdir",
            ) from None
        yield
    finally:
        os.close(handle)
