"""How fast a disk really reads, from a sample of the very file that is to be loaded."""

from __future__ import annotations

import os
import time
from pathlib import Path

_BLOCK = 4 << 20


def read_rate(path: Path, sample: int = 256 << 20, seconds: float = 5.0) -> float:
    """Bytes per second of reading ``sample`` bytes (or for ``seconds``) from the middle of ``path``.

    The sample is dropped from the page cache first, as far as the kernel allows; what other programs read meanwhile
    counts against it. A file of less than a block is taken as it comes.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(handle).st_size
        start = max(0, (size - sample) // 2)
        os.posix_fadvise(handle, start, sample, os.POSIX_FADV_DONTNEED)
        begun = time.monotonic()
        done = 0
        while done < sample and time.monotonic() - begun < seconds:
            got = len(os.pread(handle, min(_BLOCK, sample - done), start + done))
            if not got:
                break
            done += got
        return done / max(time.monotonic() - begun, 1e-6)
    finally:
        os.close(handle)
