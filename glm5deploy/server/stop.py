"""Ending the server of a work folder from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.server.guard import kill_members
from glm5deploy.server.state import ServerState, read_state, remove_state

_POLL = 0.1
_AFTER_KILL = 10.0


def stop_server(path: Path, patience: float) -> ServerState | None:
    """Stop the server recorded at ``path``: SIGTERM to its supervisor, after ``patience`` seconds SIGKILL to all.

    Returns what was stopped, None when nothing runs. Raises DeployError when it does not end, or is another user's.
    """
    state = read_state(path)
    if state is None or not (state.alive or state.supervised):
        remove_state(path)
        return None
    try:
        os.kill(state.supervisor if state.supervised else state.guard, signal.SIGTERM)
        if not _ended(state, patience):
            if state.supervised:
                os.kill(state.supervisor, signal.SIGKILL)
            if state.alive:
                kill_members(state.guard, spare=0)
            if not _ended(state, _AFTER_KILL):
                raise DeployError(
                    f"the server (process {state.guard}) does not end, not even by SIGKILL",
                    hint="a GPU driver that hangs keeps processes alive: look at dmesg; a reboot ends it",
                )
    except PermissionError:
        raise DeployError(
            f"the server (process {state.guard}) belongs to another user", hint="stop it as that user, or with sudo"
        ) from None
    remove_state(path)
    return state


def _ended(state: ServerState, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while state.alive or state.supervised:
        _reap(state.supervisor)
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True


def _reap(pid: int) -> None:
    """Take leave of a supervisor that is our own child, as in tests; others' children are none of our business."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
