"""The other machines of a cluster, reached by ssh (or a command that takes the same arguments)."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from glm5deploy.errors import DeployError
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.diagnosis import telling_lines
from glm5deploy.server.node_report import NodeReport, parse_report
from glm5deploy.server.nodes import Node
from glm5deploy.server.process import ServerExited

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
_REPORT_SECONDS = 180.0
_AFTER_GRACE = 15.0


@dataclass(frozen=True, slots=True)
class RemoteShell:
    """``words`` is run with a login and one command line after it. The program must lie under the same path there."""

    words: tuple[str, ...] = SSH
    python: str = sys.executable

    def report(self, node: Node, folder: Path, table: Path) -> NodeReport:
        """Ask a machine about itself; raises DeployError when it cannot be reached or has no glm5deploy."""
        line = shlex.join([self.python, "-m", "glm5deploy.server.node_report", str(folder), str(table)])
        hint = f"by hand: {shlex.join([*self.words, node.login, line])}"
        try:
            done = subprocess.run(
                [*self.words, node.login, line],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_REPORT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeployError(f"{node.login} did not answer within {_REPORT_SECONDS:.0f} s", hint=hint) from None
        except OSError as error:
            raise DeployError(f"cannot run {self.words[0]}: {error.strerror}", hint=hint) from error
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise DeployError(f"{node.login} cannot be asked (status {done.returncode}): {last[0][:300]}", hint=hint)
        try:
            return parse_report(done.stdout)
        except ValueError as error:
            raise DeployError(f"{node.login} answered something unexpected: {error}", hint=hint) from None

    def start(self, node: Node, command: ServeCommand, log: Path, grace: float) -> subprocess.Popen[bytes]:
        """Start a machine's part; its output comes into ``log`` here, and it ends when our end of the pipe closes."""
        agent = [self.python, "-m", "glm5deploy.server.node_agent", str(grace)]
        variables = {**command.env, "PYTHONUNBUFFERED": "1"}
        line = f"{shlex.join(['env', *(f'{k}={v}' for k, v in variables.items()), *agent])} {shlex.join(command.argv)}"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self.words, node.login, line], stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )


class Workers:
    """The machines behind the first one. A context manager: leaving it stops their parts.

    ``on_end`` is called from a thread when one of them ends by itself; :meth:`check` then raises with its log.
    """

    def __init__(
        self,
        shell: RemoteShell,
        parts: Sequence[tuple[Node, ServeCommand, Path]],
        *,
        grace: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._shell = shell
        self._parts = parts
        self._grace = grace
        self._on_end = on_end
        self._running: list[tuple[Node, subprocess.Popen[bytes], Path]] = []
        self._ended: tuple[Node, int, Path] | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        try:
            for node, command, log in self._parts:
                process = self._shell.start(node, command, log, self._grace)
                self._running.append((node, process, log))
                threading.Thread(target=self._watch, args=(node, process, log), daemon=True).start()
        except OSError as error:
            self.stop()
            raise DeployError(f"cannot run {self._shell.words[0]}: {error.strerror}") from error
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ServerExited when a machine's part has ended by itself."""
        if self._ended is None:
            return
        node, code, log = self._ended
        lines = "".join(f"\n  {line}" for line in telling_lines(log))
        raise ServerExited(
            f"the part on {node.login} ended with exit status {code}{lines}", hint=f"its whole log is {log}"
        )

    def stop(self) -> None:
        """Close every machine's pipe, which stops its part, and wait for them. Repeatable."""
        self._stopping.set()
        for _, process, _ in self._running:
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for _, process, _ in self._running:
            try:
                process.wait(self._grace + _AFTER_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, node: Node, process: subprocess.Popen[bytes], log: Path) -> None:
        code = process.wait()
        if not self._stopping.is_set() and self._ended is None:
            self._ended = (node, code, log)
            self._on_end()
