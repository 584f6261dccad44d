"""The command line as a child process, the way a user's shell or script runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READY_SECONDS = 400.0


def glm5deploy(
    *args: str | Path, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "glm5deploy", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(env or {})})


def killed_at(number: int, log: Path, *args: str | Path, env: Mapping[str, str] | None = None) -> bool:
    """Run a command that SIGKILLs itself at that stage event; False when it ended before."""
    command = [sys.executable, "-m", "tests.support.kill_at_event", str(number), str(log), "--", *map(str, args)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **(env or {})})
    if child.returncode == -signal.SIGKILL:
        return True
    assert child.returncode in (0, 130), child.stderr
    return False


@dataclass(frozen=True)
class Serving:
    """A `serve` that is READY: the event's data (``url``, ``model``, ``curl``) and the process."""

    ready: dict[str, Any]
    process: subprocess.Popen[str]


@contextlib.contextmanager
def serving(*args: str | Path, env: Mapping[str, str] | None = None) -> Iterator[Serving]:
    """``glm5deploy ARGS --json`` from its READY event to a Ctrl-C."""
    command = [sys.executable, "-m", "glm5deploy", *map(str, args), "--json"]
    process = subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env={**os.environ, **(env or {})})
    told: list[str] = []
    watchdog = threading.Timer(READY_SECONDS, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(line)
            event = json.loads(line) if line.startswith("{") else {}
            if event.get("kind") == "checkpoint" and "READY" in event.get("message", ""):
                break
        else:
            raise AssertionError(f"the server never became ready: {process.stdout and process.stdout.read()}{told}")
        watchdog.cancel()
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        yield Serving(event["data"], process)
    finally:
        watchdog.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
