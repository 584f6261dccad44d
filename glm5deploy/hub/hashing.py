"""Hashes of shards: while bytes arrive, and of what is on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from glm5deploy.hub.choice import RemoteFile

_READ = 4 << 20
FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of reading that say nothing about what is stored: the file is not to be fetched again for them."""


def prefix_step(size: int) -> int:
    """Every this many bytes of a file the hash so far is kept: at most 1024 times, in whole MiB."""
    return max(1, -(-size // (1024 << 20))) << 20


class FileHash:
    """The hash that a listing gives for a file: the LFS sha256, or git's sha1 of a blob for small files.

    ``prefixes[i]`` is the hash of the first ``(i + 1) * prefix_step(size)`` bytes. It costs nothing, being the running
    state, and tells later where a damaged file first differs.
    """

    def __init__(self, file: RemoteFile) -> None:
        if file.sha256 is not None:
            self._hasher, self.expected = hashlib.sha256(), file.sha256
        else:
            header = f"blob {file.size}\0".encode()
            self._hasher, self.expected = hashlib.sha1(header, usedforsecurity=False), file.git_oid
        self.prefixes: list[str] = []
        self._step = prefix_step(file.size)
        self.count = 0

    def update(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            part = view[: self._step - self.count % self._step]
            self._hasher.update(part)
            self.count += len(part)
            if self.count % self._step == 0:
                self.prefixes.append(self._hasher.hexdigest())
            view = view[len(part) :]

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def matches(self) -> bool:
        return self.hexdigest() == self.expected


class Stopped(Exception):
    """Another part of the work failed or the user interrupted: leave everything as it is."""


def hash_into(
    hasher: FileHash,
    path: Path,
    length: int,
    *,
    report: Callable[[int], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> int:
    """Feed the first ``length`` bytes of a file; returns how many there were. ``report`` gets bytes read so far."""
    buffer = memoryview(bytearray(min(_READ, max(length, 1))))
    done = 0
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, length, os.POSIX_FADV_SEQUENTIAL)
        while done < length:
            count = file.readinto(buffer[: length - done])
            if not count:
                break
            hasher.update(buffer[:count])
            done += count
            report(done)
            if stop is not None and stop.is_set():
                raise Stopped
    return done


def first_difference(recorded: Sequence[str], found: Sequence[str], size: int) -> tuple[int, int]:
    """The span of bytes in which a file of ``size`` bytes first differs from its recorded prefix hashes.

    When all whole steps agree, the difference is in the rest.
    """
    step = prefix_step(size)
    pairs = enumerate(zip(recorded, found, strict=False))
    index = next((index for index, (a, b) in pairs if a != b), min(len(recorded), len(found)))
    return index * step, min((index + 1) * step, size)


def differing_spans(a: Path, b: Path, *, block: int = 1 << 20) -> list[tuple[int, int]]:
    """Byte spans (start, end) in which two files differ, to within ``block``; a longer tail counts as different."""
    spans: list[tuple[int, int]] = []
    offset = 0
    with a.open("rb") as left, b.open("rb") as right:
        while True:
            x, y = left.read(block), right.read(block)
            if not x and not y:
                return spans
            end = offset + max(len(x), len(y))
            if x != y:
                if spans and spans[-1][1] == offset:
                    spans[-1] = (spans[-1][0], end)
                else:
                    spans.append((offset, end))
            offset = end
