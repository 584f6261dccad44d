"""Room on disk: asked for before a transfer, and said plainly when it runs out in the middle of one."""

from __future__ import annotations

import errno
from pathlib import Path

from glm5deploy.errors import DeployError, DiskFullError
from glm5deploy.files import existing, free_bytes
from glm5deploy.sizes import human_bytes

_MOST_SLACK = 64 << 20  # records, logs and what other programs write meanwhile
_UNMERGED = "`glm5deploy run --no-merge` (GLM5DEPLOY_MERGE_MODE=never for fetch alone)"


def same_file_system(a: Path, b: Path) -> bool:
    """Both paths are, or will be, on one file system."""
    return existing(a).stat().st_dev == existing(b).stat().st_dev


def require_room(destination: Path, missing: int, later: int) -> None:
    """``missing`` bytes are still to come, and ``later`` more for what follows on the same file system.

    :raises DiskFullError: they do not fit.
    """
    free = free_bytes(destination)
    slack = min(_MOST_SLACK, missing // 16)
    if missing + later + slack > free:
        then = f" and {human_bytes(later)} for the merge" if later else ""
        raise DiskFullError(
            f"{destination} has {human_bytes(free)} free; {human_bytes(missing)} are still to be fetched{then}, "
            f"with {human_bytes(slack)} to spare",
            hint="free some space, or choose another --workdir"
            + (f"; {_UNMERGED} serves the shards as they are" if later else ""),
        )


def explain_write_error(error: OSError, destination: Path, missing: int) -> DeployError:
    """An error of writing to the destination, for the user. What has arrived stays there."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        full = "is full" if error.errno == errno.ENOSPC else "has reached your quota"
        return DiskFullError(
            f"{destination} {full}: {human_bytes(missing)} are still to be fetched, "
            f"{human_bytes(free_bytes(destination))} are free",
            hint="free some space and run fetch again; it goes on from where it stopped",
        )
    where = error.filename or destination
    return DeployError(
        f"cannot write {where}: {error.strerror or error}", hint="choose a folder that can be written with --workdir"
    )
