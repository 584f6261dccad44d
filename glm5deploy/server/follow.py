"""A log's end, and what is added to it, across a restart of the server."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from pathlib import Path

from glm5deploy.errors import DeployError

_BLOCK = 64 << 10
_POLL = 0.25


def last_lines(log: Path, count: int) -> tuple[list[str], int]:
    """The last ``count`` lines of a log, ends included, and its size in bytes; DeployError when there is none."""
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, data = size, b""
            while start > 0 and data.count(b"\n") <= count:
                step = min(_BLOCK, start)
                start -= step
                file.seek(start)
                data = file.read(step) + data
    except FileNotFoundError:
        raise DeployError(f"there is no log {log}", hint="glm5deploy serve writes it") from None
    lines = data.splitlines(keepends=True)[-count:] if count else []
    return [line.decode("utf-8", "replace") for line in lines], size


def follow(log: Path, position: int) -> Iterator[str]:
    """Whatever is written to ``log`` from ``position`` (bytes) on, for ever; a log that begins anew is read from its
    beginning."""
    file = log.open("rb")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a block may end in the middle of a character
    try:
        file.seek(position)
        while True:
            replaced = _replaced(log, file.fileno(), file.tell())
            data = file.read(_BLOCK)  # after that look: what was written before the log began anew is not lost
            if data:
                yield decoder.decode(data)
                continue
            if replaced:
                decoder.reset()
                file.close()
                file = log.open("rb")
                continue
            time.sleep(_POLL)
    finally:
        file.close()


def _replaced(log: Path, handle: int, position: int) -> bool:
    try:
        now = log.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(handle)
    return (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino) or now.st_size < position
