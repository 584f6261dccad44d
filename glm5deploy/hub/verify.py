"""What is on disk, compared with the plan: cheaply by recorded facts, or completely by hash."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm5deploy.errors import DeployError
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.hashing import FORBIDDEN, OUR_OWN, FileHash, first_difference, hash_into
from glm5deploy.hub.partial import discard, partial_path
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.records import STATE_FOLDER, read_record, write_record
from glm5deploy.progress import Progress, ProgressSink, ignore_progress

State = Literal["verified", "unverified", "partial", "missing"]


@dataclass(frozen=True, slots=True)
class ShardState:
    """``present`` is how many of the shard's bytes are on disk, complete or partial."""

    file: RemoteFile
    state: State
    present: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of hashing one shard. ``span`` is where a damaged file first differs, when that is known."""

    file: RemoteFile
    path: Path
    problem: Literal["", "missing", "size", "hash", "unreadable"]
    detail: str = ""
    span: tuple[int, int] | None = None


def record_path(destination: Path, file: RemoteFile) -> Path:
    return destination / STATE_FOLDER / f"{file.path}.verified.json"


def record_verified(destination: Path, file: RemoteFile, commit: str, prefixes: Sequence[str]) -> None:
    """Note that the file in its place has the listed content; holds while size and mtime stay.

    Nothing of an earlier transfer of it is needed any more.
    """
    found = (destination / file.path).stat()
    content = {"hash": file.sha256 or file.git_oid, "size": found.st_size, "mtime_ns": found.st_mtime_ns}
    write_record(record_path(destination, file), {**content, "commit": commit, "prefixes": list(prefixes)})
    discard(destination, file)


def _withdraw(record: Path) -> None:
    """The file is no longer what was proved; the prefix hashes stay, they tell where a damaged file differs."""
    if record.exists():
        prefixes = read_record(record).get("prefixes")
        write_record(record, {"prefixes": prefixes if isinstance(prefixes, list) else []})


def is_verified(destination: Path, file: RemoteFile) -> bool:
    """The file has been proved to be the listed content and has not been touched since (size and mtime)."""
    record = read_record(record_path(destination, file))
    try:
        found = (destination / file.path).stat()
    except OSError:
        return False
    expected = (file.sha256 or file.git_oid, file.size, found.st_mtime_ns)
    return (record.get("hash"), found.st_size, record.get("mtime_ns")) == expected


def proved_mtime(destination: Path, file: RemoteFile) -> int:
    """The file's mtime (ns) when it was last proved; 0 when there is no record of that."""
    mtime = read_record(record_path(destination, file)).get("mtime_ns")
    return mtime if isinstance(mtime, int) else 0


def shard_states(plan: FetchPlan, destination: Path) -> list[ShardState]:
    """What is there of each shard, without reading any content."""
    states = []
    for file in plan.files:
        final, partial = destination / file.path, partial_path(destination, file)
        if is_verified(destination, file):
            states.append(ShardState(file, "verified", file.size))
        elif final.is_file() and final.stat().st_size == file.size:
            states.append(ShardState(file, "unverified", file.size))
        elif partial.is_file():
            states.append(ShardState(file, "partial", min(partial.stat().st_size, file.size)))
        else:
            states.append(ShardState(file, "missing", 0))
    return states


def verify(
    plan: FetchPlan,
    destination: Path,
    *,
    parallel: int | None = None,
    progress: ProgressSink = ignore_progress,
    record: bool = True,
) -> list[Verdict]:
    """Hash every shard of the plan, ``parallel`` at a time (one a core), and give a verdict on each in shard order.

    Sound shards are recorded as verified; the records of others are withdrawn, so that fetch brings them again.
    Without ``record`` nothing is written.
    """
    done = {file.path: 0 for file in plan.files}
    lock = threading.Lock()

    def report(file: RemoteFile, count: int) -> None:
        with lock:
            done[file.path] = count
            total = sum(done.values())
        progress(Progress(file.name, count, file.size, note="hashing"))
        progress(Progress("total", total, plan.size, note="hashing"))

    return check_files(plan, destination, plan.files, parallel=parallel, report=report, record=record)


def check_files(
    plan: FetchPlan,
    destination: Path,
    files: Sequence[RemoteFile],
    *,
    parallel: int | None = None,
    report: Callable[[RemoteFile, int], None] = lambda _f, _n: None,
    record: bool = True,
) -> list[Verdict]:
    """:func:`check_file` for several shards at once, in their order; an interrupt stops all of them."""
    stop = threading.Event()

    def one(file: RemoteFile) -> Verdict:
        return check_file(plan, destination, file, report=lambda count: report(file, count), stop=stop, record=record)

    workers = max(1, min(parallel or os.cpu_count() or 1, len(files)))
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        try:
            return list(pool.map(one, files))
        except BaseException:
            stop.set()
            raise


def check_file(
    plan: FetchPlan,
    destination: Path,
    file: RemoteFile,
    *,
    report: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
    record: bool = True,
) -> Verdict:
    """Hash one shard; records or withdraws its verification, unless nothing is to be written (``record``).

    :raises DeployError: it may not be read, or cannot be for want of memory or handles.
    :raises Stopped: ``stop`` was set.
    """
    hasher = FileHash(file)
    verdict = _judge(destination, file, hasher, report, stop)
    if record and verdict.problem:
        _withdraw(record_path(destination, file))
    elif record:
        record_verified(destination, file, plan.commit, hasher.prefixes)
    return verdict


def _judge(
    destination: Path,
    file: RemoteFile,
    hasher: FileHash,
    report: Callable[[int], None],
    stop: threading.Event | None,
) -> Verdict:
    path = destination / file.path
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return Verdict(file, path, "missing", f"{path} is missing")
    if size != file.size:
        return Verdict(file, path, "size", f"{path} has {size} bytes, the listing says {file.size}")
    try:
        hash_into(hasher, path, size, report=report, stop=stop)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in FORBIDDEN | OUR_OWN:
            hint = "that is no damage; put it right and run again"
            raise DeployError(f"{path} cannot be read: {reason}", hint=hint) from error
        return Verdict(file, path, "unreadable", f"{path} cannot be read after byte {hasher.count}: {reason}")
    if hasher.matches():
        return Verdict(file, path, "")
    recorded = read_record(record_path(destination, file)).get("prefixes")
    known = [str(p) for p in recorded] if isinstance(recorded, list) else []
    span = first_difference(known, hasher.prefixes, size) if known else None
    where = f", first between bytes {span[0]} and {span[1]}" if span else ""
    return Verdict(file, path, "hash", f"{path} is damaged{where}: its hash is not the listing's", span)
