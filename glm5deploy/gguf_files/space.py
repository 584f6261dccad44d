"""How much memory and disk there is, and what a failed system call means for a merge."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from glm5deploy.errors import DeployError, DiskFullError
from glm5deploy.files import free_bytes
from glm5deploy.sizes import human_bytes

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_bytes() -> int:
    """Physical memory, or the limit of this container if that is less."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return memory
    return min(memory, int(limit)) if limit.isdigit() else memory


def larger_than_cache(size: int) -> bool:
    """Whether copying ``size`` bytes through the page cache would mostly reclaim pages."""
    return size > memory_bytes() // 2


def explain(error: OSError, partial: Path, size: int) -> DeployError:
    """A system error during a merge into ``partial`` of ``size`` bytes, as what the user can do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        allocated = partial.stat().st_blocks * 512 if partial.exists() else 0
        return DiskFullError(
            f"{partial.parent}: {error.strerror}: the merged file needs {human_bytes(size - allocated)} more, "
            f"{human_bytes(free_bytes(partial.parent))} are free",
            hint="free space and run the same command again, it goes on where it stopped; --consume needs the room of "
            "one shard, and serving needs no merge (--no-merge)",
        )
    hint = None
    if error.errno == errno.EIO:
        hint = "the disk cannot read or write there; a shard comes again with `glm5deploy fetch --repair`"
    return DeployError(f"{error.filename or partial}: {error.strerror or error}", hint=hint)
