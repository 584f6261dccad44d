"""A running server: started in a session of its own, its output in a file, stopped without leftovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from glm5deploy.errors import DeployError
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.diagnosis import find_faults, telling_lines
from glm5deploy.server.guard import kill_members, session_members

KEPT_LOGS = 3
_AFTER_GRACE = 10.0  # seconds that the guard itself may take once the grace period is over


def start_guarded(
    argv: Sequence[str], grace: float, output: IO[bytes], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command below a guard, in a session of its own: it ends when this process does, however that ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "glm5deploy.server.guard", str(grace), *argv],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
    )


def end_guarded(process: subprocess.Popen[bytes], grace: float) -> None:
    """End what :func:`start_guarded` has started: SIGTERM, and SIGKILL to what is left after the grace period."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(grace + _AFTER_GRACE)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        kill_members(process.pid, spare=0)


class ServerExited(DeployError):
    """The server ended by itself; the message holds the exit status and the log's telling lines."""


class ServerProcess:
    """Context manager around one ``vllm serve``; leaving it stops the server and every process it started.

    ``secrets`` are environment variables that go to the process and nowhere else.
    """

    def __init__(
        self, command: ServeCommand, log: Path, *, secrets: Mapping[str, str] | None = None, grace: float = 20.0
    ) -> None:
        self.log = log
        self.grace = grace
        self.beside: Callable[[], None] = lambda: None
        """Called by :meth:`check`, to raise for what must run beside the server."""
        self._stopped = False
        rotate_logs(log)
        with log.open("ab") as output:
            env = {**os.environ, **command.env, **(secrets or {}), "PYTHONUNBUFFERED": "1"}
            self._process = start_guarded(command.argv, grace, output, env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    @property
    def session(self) -> int:
        """Id of the session (and of the guard): every process of the server is in it."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def check(self, wait: float = 0.0) -> None:
        """Raise ServerExited when the server is no longer running, or stops running within ``wait`` seconds."""
        self.beside()
        try:
            code = self._process.wait(wait)
        except subprocess.TimeoutExpired:
            return
        lines = telling_lines(self.log)
        known = [fault.remedy for fault, _ in find_faults(lines)]
        raise ServerExited(
            f"the server ended with exit status {code}" + "".join(f"\n  {line}" for line in lines),
            hint="; ".join([*known[:1], f"the whole log is {self.log}"]),
        )

    def stop(self) -> None:
        """End the server: SIGTERM, and SIGKILL to what is left after the grace period. Repeatable."""
        if self._stopped:
            return
        self._stopped = True
        end_guarded(self._process, self.grace)

    def members(self) -> list[int]:
        """Ids of the server's living processes, the guard among them."""
        return session_members(self.session)


def rotate_logs(log: Path) -> None:
    """Move ``serve.log`` to ``serve.log.1`` and so on, keeping KEPT_LOGS; raises DeployError where not allowed."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        for number in range(KEPT_LOGS - 1, 0, -1):
            older = log if number == 1 else log.with_name(f"{log.name}.{number - 1}")
            if older.exists():
                older.replace(log.with_name(f"{log.name}.{number}"))
        log.touch()
    except OSError as error:
        raise DeployError(
            f"cannot write the server's log {log}: {error.strerror}",
            hint="choose a work folder you can write in with --workdir",
        ) from error
