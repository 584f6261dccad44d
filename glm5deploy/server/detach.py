"""A supervisor in the background: started in a session of its own, waited for until it says ready or why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from glm5deploy.errors import DeployError

_POLL = 0.2
_LARGEST = 4 << 20
_STOP_SECONDS = 60.0


def start_detached(
    arguments: Sequence[str], folder: Path, *, on_progress: Callable[[str], None] = lambda _: None
) -> dict[str, object]:
    """Run ``glm5deploy ARGUMENTS`` (which end with ``--json``) in the background; return the object it prints.

    Its output goes to ``folder``/supervisor.json and supervisor.log. ``on_progress`` gets the log's newest line now and
    then. Raises DeployError with its own message and exit code when it fails first; stops it when interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answer, log = folder / "supervisor.json", folder / "supervisor.log"
    with answer.open("wb") as out, log.open("wb") as err:
        child = subprocess.Popen(
            [sys.executable, "-m", "glm5deploy", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    shown = ""
    try:
        while True:
            ended = child.poll() is not None
            said = _object(answer)
            if said is not None and "error" not in said:
                return {**said, "supervisor": child.pid}
            if ended:
                raise _failure(said, child.returncode, log)
            line = _last_line(log)
            if line and line != shown:
                on_progress(line)
                shown = line
            time.sleep(_POLL)
    except KeyboardInterrupt:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()  # the server ends with it: its guard notices
        raise


def _failure(said: dict[str, object] | None, code: int, log: Path) -> DeployError:
    told = said.get("error") if said else None
    if isinstance(told, dict):
        hint = told.get("hint")
        error = DeployError(str(told.get("message")), hint=str(hint) if hint else None)
        error.exit_code = code
        return error
    return DeployError(f"the supervisor ended with {code}: {_last_line(log) or 'no word'}", hint=f"its log is {log}")


def _object(path: Path) -> dict[str, object] | None:
    """The object on the file's first whole line; None while there is none."""
    with path.open("rb") as file:
        line = file.read(_LARGEST)
    if not line.endswith(b"\n"):
        return None
    try:
        value = json.loads(line.splitlines()[0])
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 4096))
        lines = file.read().splitlines()
    return _message(lines[-1].decode("utf-8", "replace")) if lines else ""


def _message(line: str) -> str:
    """The words of an event line; a line that is none stays as it is."""
    try:
        event = json.loads(line)
        progress = event.get("progress") or {}
        return str(event.get("message") or progress.get("note") or progress.get("task") or "")
    except (ValueError, AttributeError):
        return line
