"""A file open through the page cache and, where it can be, past it."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.linux_files import BLOCK, open_direct


class OpenFile:
    """A file's buffered descriptor, and a direct one if the file system has it."""

    def __init__(self, path: Path, flags: int, *, direct: bool) -> None:
        self.path = path
        self._writable = bool(flags & os.O_RDWR)
        self.buffered = os.open(path, flags | os.O_CLOEXEC)
        self.direct = open_direct(path, flags) if direct else None

    def close(self) -> None:
        os.close(self.buffered)
        if self.direct is not None:
            os.close(self.direct)

    def direct_works(self) -> bool:
        """Some file systems accept the flag and refuse the first transfer: read the first block, and write it back."""
        if self.direct is None:
            return False
        block = memoryview(mmap.mmap(-1, BLOCK))
        try:
            got = os.preadv(self.direct, [block], 0)
            if self._writable and got == BLOCK:
                os.pwrite(self.direct, block, 0)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise
        return True


def fill(file: OpenFile, descriptor: int, part: memoryview, offset: int, *, at_least: int | None = None) -> int:
    """Read ``part`` full, or ``at_least`` so much of it where the file may end inside the last block."""
    needed, done = len(part) if at_least is None else at_least, 0
    while done < needed:
        try:
            got = os.preadv(descriptor, [part[done:]], offset + done)
        except OSError as error:
            raise OSError(error.errno, f"at offset {offset + done}: {error.strerror}", str(file.path)) from error
        ends_inside_block = at_least is not None and got % BLOCK and done + got < needed
        if got == 0 or ends_inside_block:
            missing = needed - done - got
            raise FileFormatError(
                f"{file.path}: at offset {offset + done + got}: the file ends {missing} bytes too early",
                hint="it was cut while it was read: fetch it again",
            )
        done += got
    return done


def write_all(descriptor: int, part: memoryview, offset: int) -> None:
    """Write the whole of ``part`` at ``offset``."""
    while part:
        written = os.pwrite(descriptor, part, offset)
        part, offset = part[written:], offset + written
