"""A shard that is not complete: its bytes, and a sidecar that says which content they belong to."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from glm5deploy.files import free_bytes, sync_folder
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.records import STATE_FOLDER, read_record, write_record

_WRITEBACK = 32 << 20
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: begin writing dirty pages, do not wait for them


def start_writeback(handle: int, offset: int, length: int) -> None:
    """Let the disk work while bytes arrive: otherwise memory fills, and the last fsync of a shard takes minutes.

    A hint only: where the C library lacks the call, or it fails, nothing is lost but time.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(handle, ctypes.c_int64(offset), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def partial_path(destination: Path, file: RemoteFile) -> Path:
    """Where a shard's bytes are until all of them came."""
    return destination / STATE_FOLDER / f"{file.path}.partial"


def _sidecar(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.json")


def _aside(partial: Path) -> Path:
    return partial.with_suffix(".mismatch")


def discard(destination: Path, file: RemoteFile) -> None:
    """Remove what a transfer left of a shard that is proved without it.

    That is a first copy that was wrong; a sidecar, where the process was killed between the last two steps of
    :meth:`Partial.complete`; and where the shard was adopted or put in place by hand, its half of a download.
    """
    partial = partial_path(destination, file)
    for path in (partial, _sidecar(partial), _aside(partial)):
        path.unlink(missing_ok=True)


class Partial:
    """``.fetch/<path>.partial``: append-only, so its length is the offset to go on from, also after SIGKILL.

    The sidecar names the content (hash and size), the storage's ETag that ``If-Range`` sends back, and whether the
    content came whole and ``wrong`` once before. A partial of other content is started over. Bytes that a power cut may
    have spoilt are read again for the hash before the transfer goes on, so they cannot pass.
    """

    def __init__(self, destination: Path, file: RemoteFile) -> None:
        self.path = partial_path(destination, file)
        self.aside = _aside(self.path)
        self.etag: str | None = None
        self.wrong = False
        self._sidecar = _sidecar(self.path)
        self._content = {"size": file.size, "hash": file.sha256 or file.git_oid}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        record = read_record(self._sidecar)
        known = all(record.get(key) == value for key, value in self._content.items())
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.offset = self._started = os.fstat(self._handle).st_size
        if not known or self.offset > file.size:
            self.restart()
            self._write_sidecar()
        else:
            etag, self.wrong = record.get("etag"), record.get("wrong") is True
            self.etag = etag if isinstance(etag, str) else None

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            count = os.write(self._handle, view)
            self.offset += count
            view = view[count:]
        if self.offset - self._started >= _WRITEBACK:
            start_writeback(self._handle, self._started, self.offset - self._started)
            self._started = self.offset

    def remember(self, etag: str | None) -> None:
        """Keep the storage's ETag for the next ``If-Range``. Weak ones do not promise equal bytes."""
        if etag is not None and etag.startswith("W/"):
            etag = None
        if etag != self.etag:
            self.etag = etag
            self._write_sidecar()

    def restart(self) -> None:
        """Drop all bytes: the storage's content is not the one they came from."""
        if self.offset:
            os.ftruncate(self._handle, 0)
        self.offset, self.etag, self._started = 0, None, 0

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def complete(self, final: Path) -> None:
        """Make the bytes durable, then give them their final name, durably before the sidecar goes."""
        os.fsync(self._handle)
        self.close()
        final.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(final)
        for folder in (final.parent, final.parent.parent):  # the second may have got the first just now
            sync_folder(folder)
        self._sidecar.unlink(missing_ok=True)

    def set_aside(self) -> None:
        """Complete but wrong: keep the bytes for comparison, where there is room for two copies, and begin again."""
        self.close()
        if free_bytes(self.path.parent) >= self.offset:
            self.path.replace(self.aside)
        else:
            self.path.unlink()
        self.etag, self.wrong = None, True
        self._write_sidecar()

    def _write_sidecar(self) -> None:
        etag = {} if self.etag is None else {"etag": self.etag}
        write_record(self._sidecar, {**self._content, **etag, **({"wrong": True} if self.wrong else {})})
