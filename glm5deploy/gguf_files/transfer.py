"""Copy a range of one file to a range of another: shared blocks, past the page cache, or through it.

Through the page cache a call moves 128 KiB by default: larger writes make the kernel look for large free pieces of
memory, and once memory is fragmented 1 MiB cost four times the CPU (docs/benchmarks/merge.md). Past it (O_DIRECT)
whatever is larger than memory costs no reclaim; that needs aligned offsets on both sides, so blocks are read aligned,
moved into place in memory and written aligned, and the few bytes at a range's edges go through the cache.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.linux_files import BLOCK, clone_range
from glm5deploy.gguf_files.merge_plan import Copy
from glm5deploy.gguf_files.open_file import OpenFile, fill, write_all

BUFFERED_CHUNK = 128 << 10
DIRECT_CHUNK = 4 << 20


class Sink(Protocol):
    """What sees the bytes on their way; ``hashlib`` objects are sinks."""

    def update(self, data: memoryview, /) -> object: ...


class Stopped(Exception):
    """Raised in a worker when another one failed or the user interrupted."""


class Transfer:
    """Copies ranges of ``sources`` into ``target``; safe to use from several threads.

    ``direct`` asks for O_DIRECT both ways, given up where a file system refuses. ``stopped`` is looked at between
    chunks; ``moved`` counts bytes for a progress display.
    """

    def __init__(
        self, sources: list[Path | None], target: Path, *, direct: bool, chunk_bytes: int, stopped: Callable[[], bool]
    ) -> None:
        self._chunk = chunk_bytes
        self._stopped = stopped
        self._local = threading.local()
        self._sources: list[OpenFile | None] = []
        self._target = OpenFile(target, os.O_RDWR, direct=direct)
        self.direct = False
        self.cloning = True
        self.moved = 0
        self._moving = threading.Lock()
        try:
            for path in sources:
                self._sources.append(None if path is None else OpenFile(path, os.O_RDONLY, direct=direct))
            files = [file for file in (*self._sources, self._target) if file is not None]
            self.direct = direct and all(file.direct_works() for file in files)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in (self._target, *self._sources):
            if file is not None:
                file.close()

    def forget(self, number: int) -> None:
        """Close a source that is not needed any more."""
        file, self._sources[number] = self._sources[number], None
        if file is not None:
            file.close()

    def sync(self) -> None:
        """Return when everything written so far is on the disk."""
        os.fdatasync(self._target.buffered)

    def clone(self, copy: Copy) -> bool:
        """Share the blocks of a range whose offsets and length are whole blocks; False where that is refused."""
        source = self._source(copy.source)
        if self.cloning:
            self.cloning = clone_range(
                source.buffered, copy.source_offset, self._target.buffered, copy.offset, copy.length
            )
        return self.cloning

    def copy(self, copy: Copy, sink: Sink | None = None) -> None:
        """Copy a range; raises :class:`FileFormatError` when the source ends early, ``OSError`` of the system."""
        source = self._source(copy.source)
        begin = -(-copy.offset // BLOCK) * BLOCK
        end = (copy.offset + copy.length) // BLOCK * BLOCK
        if not self.direct or source.direct is None or begin >= end:
            self._copy_buffered(source, copy.source_offset, copy.offset, copy.length, sink)
            return
        shift = copy.source_offset - copy.offset
        self._copy_buffered(source, copy.source_offset, copy.offset, begin - copy.offset, sink)
        self._copy_direct(source, source.direct, begin + shift, begin, end - begin, sink)
        self._copy_buffered(source, end + shift, end, copy.offset + copy.length - end, sink)

    def read_back(self, offset: int, length: int, sink: Sink) -> None:
        """Feed ``[offset, offset + length)`` of the target to ``sink``, from the disk where it can be helped."""
        os.posix_fadvise(self._target.buffered, offset, length, os.POSIX_FADV_DONTNEED)
        self._read(self._target, offset, length, sink)

    def read_source(self, copy: Copy, sink: Sink) -> None:
        """Feed the source's bytes of ``copy`` to ``sink``."""
        self._read(self._source(copy.source), copy.source_offset, copy.length, sink)

    def _source(self, number: int) -> OpenFile:
        file = self._sources[number]
        if file is None:
            raise FileFormatError(f"shard {number + 1} is needed, but was released already")
        return file

    def _read(self, file: OpenFile, offset: int, length: int, sink: Sink) -> None:
        buffer = self._buffers()[0]
        while length:
            part = buffer[: min(self._chunk, length)]
            fill(file, file.buffered, part, offset)
            sink.update(part)
            offset, length = offset + len(part), length - len(part)

    def _copy_buffered(self, source: OpenFile, source_offset: int, offset: int, length: int, sink: Sink | None) -> None:
        buffer = self._buffers()[0]
        while length:
            part = buffer[: min(self._chunk, length)]
            fill(source, source.buffered, part, source_offset)
            if sink is not None:
                sink.update(part)
            write_all(self._target.buffered, part, offset)
            self._count(len(part))
            source_offset, offset, length = source_offset + len(part), offset + len(part), length - len(part)

    def _copy_direct(
        self, source: OpenFile, descriptor: int, source_offset: int, offset: int, length: int, sink: Sink | None
    ) -> None:
        """``offset`` and ``length`` are whole blocks; ``source_offset`` is anything."""
        wide, aligned = self._buffers()
        before = source_offset % BLOCK
        target = self._target.direct if self._target.direct is not None else self._target.buffered
        while length:
            size = min(self._chunk, length)
            window = wide[: -(-(before + size) // BLOCK) * BLOCK]
            fill(source, descriptor, window, source_offset - before, at_least=before + size)
            part = wide[before : before + size]
            if sink is not None:
                sink.update(part)
            if before:
                aligned[:size] = part
                part = aligned[:size]
            write_all(target, part, offset)
            self._count(size)
            source_offset, offset, length = source_offset + size, offset + size, length - size

    def _count(self, moved: int) -> None:
        with self._moving:
            self.moved += moved
        if self._stopped():
            raise Stopped

    def _buffers(self) -> tuple[memoryview, memoryview]:
        """Two page-aligned buffers of this thread: one block wider than a chunk at either end, and a chunk."""
        if not hasattr(self._local, "buffers"):
            wide = memoryview(mmap.mmap(-1, self._chunk + 2 * BLOCK))
            aligned = memoryview(mmap.mmap(-1, self._chunk)) if self.direct else wide
            self._local.buffers = (wide, aligned)
        buffers: tuple[memoryview, memoryview] = self._local.buffers
        return buffers
