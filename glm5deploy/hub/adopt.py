"""Taking over files that are already on this machine: found by size, proved by hash, linked rather than copied."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.files import sync_folder
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.hashing import FORBIDDEN, OUR_OWN, FileHash, hash_into

_FICLONE = 0x40049409  # linux/fs.h: share the data blocks of another file
_MOST_FILES = 100_000
_COPY = 4 << 20


def find_copy(
    file: RemoteFile,
    folder: Path,
    *,
    report: Callable[[int], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> tuple[Path, tuple[str, ...]] | None:
    """A file below ``folder`` with the listed content, and its prefix hashes. Files of the right name come first.

    Symbolic links are followed to files, not to folders: a hub cache's snapshots work. A file that cannot be read is
    named in a ``note`` and passed over.

    :raises DeployError: the file of the right name may not be read, and no other has the content.
    :raises OSError: nothing can be read for want of memory or handles.
    """
    refused: DeployError | None = None
    same_size = [path for path in _files(folder) if _size(path) == file.size]
    for path in sorted(same_size, key=lambda path: path.name != file.name):
        hasher = FileHash(file)
        try:
            hash_into(hasher, path, file.size, report=report, stop=stop)
        except OSError as error:
            if error.errno in OUR_OWN:
                raise
            reason = error.strerror or error
            note(f"{path} may be {file.name}, but cannot be read and is passed over: {reason}")
            if error.errno in FORBIDDEN and path.name == file.name:
                hint = "make it readable, or leave --from out to fetch it"
                refused = DeployError(f"{path} cannot be read: {reason}", hint=hint)
            continue
        if hasher.matches():
            return path, tuple(hasher.prefixes)
    if refused:  # before hundreds of gigabytes are fetched that lie here
        raise refused
    return None


def take_over(source: Path, target: Path, temporary: Path) -> str:
    """Make ``target`` the same content as ``source`` by way of ``temporary``, a name in the same file system.

    Returns how: "reflink", "hard link" or "copy"; a copy has to be proved by its reader.

    A reflink is independent of its source; a hard link shares it, which is safe here because shards are never written
    to in place.
    """
    source = source.resolve(strict=True)
    for path in (target, temporary):
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)
    try:
        how = _clone(source, temporary)
        temporary.replace(target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return how


def _clone(source: Path, temporary: Path) -> str:
    unsupported = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EMLINK, errno.ENOSYS}
    with source.open("rb") as reading, temporary.open("xb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), _FICLONE, reading.fileno())
            os.fsync(writing.fileno())
            return "reflink"
        except OSError as error:
            if error.errno not in unsupported:
                raise
    temporary.unlink()
    try:
        os.link(source, temporary)
        return "hard link"
    except OSError as error:
        if error.errno not in unsupported:
            raise
    with source.open("rb") as reading, temporary.open("xb") as writing:
        shutil.copyfileobj(reading, writing, _COPY)
        writing.flush()
        os.fsync(writing.fileno())
    return "copy"


def _files(folder: Path) -> Iterator[Path]:
    seen = 0
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            seen += 1
            if seen > _MOST_FILES:
                return
            yield Path(root, name)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:
        return -1
