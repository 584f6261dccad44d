"""A server whose glm5deploy died is on its way out: its port is free once it is gone."""

from __future__ import annotations

import time
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.server.state import read_state, remove_state

_EXTRA = 10.0


def wait_for_leftover(path: Path, grace: float) -> None:
    """Wait until the server recorded at ``path`` has ended, and forget it.

    Raises DeployError when it is still supervised, or does not end within ``grace`` seconds and some.
    """
    state = read_state(path)
    if state is None:
        return
    end = time.monotonic() + grace + _EXTRA
    while state.alive:
        if state.supervised:
            raise DeployError(f"a server of this work folder is running at {state.url}", hint="glm5deploy stop")
        if time.monotonic() > end:
            raise DeployError(
                f"an earlier server (process {state.guard}) does not end", hint=f"kill -KILL -{state.guard}"
            )
        time.sleep(0.1)
    remove_state(path)
