"""One process at a time in a work folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.files import TEMPORARY


@contextmanager
def work_lock(workdir: Path) -> Iterator[None]:
    """Hold ``<workdir>/.glm5deploy/lock``.

    The kernel's file lock decides, so that the lock of a process that died is free at once; the owner's pid and host
    written into it are only for the message.

    :raises DeployError: another live process holds it, or the folder cannot be written.
    """
    path = workdir / ".glm5deploy" / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DeployError(
            f"cannot write in {workdir}: {error.strerror}", hint="choose another folder with --workdir"
        ) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeployError(
                f"{workdir} is in use by {_owner(handle)}",
                hint="wait for it, stop it, or choose another folder with --workdir",
            ) from None
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, owner, 0)
        for left in path.parent.glob(f".*{TEMPORARY}"):  # of a process that was killed while it wrote
            left.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def _owner(handle: int) -> str:
    try:
        owner = json.loads(os.pread(handle, 4096, 0))
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
