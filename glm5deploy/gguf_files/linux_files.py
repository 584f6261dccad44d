"""Linux file operations that Python's ``os`` lacks: reserving space, punching holes, sharing blocks, O_DIRECT.

Each returns False where the file system does not offer it, and raises ``OSError`` for anything else.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from pathlib import Path

BLOCK = 4096  # what O_DIRECT and FICLONERANGE align to on every file system met; the logical block divides it

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
_FICLONERANGE = 0x4020940D
_NOT_OFFERED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.ENOTTY, errno.EBADF}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.fallocate.restype = ctypes.c_int


def reserve(descriptor: int, offset: int, length: int) -> bool:
    """Allocate blocks for ``[offset, offset + length)``, so that writing there cannot run out of space."""
    return _fallocate(descriptor, 0, offset, length)


def punch_hole(descriptor: int, offset: int, length: int) -> bool:
    """Give the blocks of ``[offset, offset + length)`` back; the range then reads as zeros, the size stays."""
    return _fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length)


def clone_range(source: int, source_offset: int, target: int, offset: int, length: int) -> bool:
    """Let ``target`` share ``source``'s blocks; all three numbers must be multiples of the file system's block."""
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("<qQQQ", source, source_offset, length, offset))
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return False
        raise
    return True


def open_direct(path: Path, flags: int) -> int | None:
    """A descriptor that bypasses the page cache, or None where the file system refuses."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NOT_OFFERED:
            return None
        raise


def can_punch(folder: Path) -> bool:
    """Whether the file system of ``folder`` can punch holes, tried on a file without a name in it."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _NOT_OFFERED | {errno.EISDIR}:
            return False
        raise
    try:
        os.pwrite(descriptor, bytes(2 * BLOCK), 0)
        return punch_hole(descriptor, 0, BLOCK)
    finally:
        os.close(descriptor)


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    if length <= 0 or _libc.fallocate(descriptor, mode, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number))
