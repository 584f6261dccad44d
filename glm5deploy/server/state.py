"""Which server a work folder has running: a small file that `stop`, `logs` and `serve` itself read.

A process id alone proves nothing, since ids are used again: a process counts as ours when its start time fits as well.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from glm5deploy.files import write_json

_LARGEST = 64 << 10


@dataclass(frozen=True, slots=True)
class ServerState:
    """``supervisor`` is the glm5deploy process that watches the server; ``guard`` leads the server's session.

    The ``…_started`` times are seconds since the epoch, as psutil tells them.
    """

    phase: Literal["starting", "ready"]
    supervisor: int
    supervisor_started: float
    guard: int
    guard_started: float
    url: str
    name: str
    log: str
    key_source: str = ""

    @property
    def supervised(self) -> bool:
        return _is(self.supervisor, self.supervisor_started)

    @property
    def alive(self) -> bool:
        return _is(self.guard, self.guard_started)


def state_path(workdir: Path) -> Path:
    return workdir / ".glm5deploy" / "server.json"


def start_time(pid: int) -> float:
    """When a process started; 0 when there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0


def _is(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started) < 0.05 and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


def write_state(path: Path, state: ServerState) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    write_json(path, asdict(state))


def read_state(path: Path) -> ServerState | None:
    """The recorded server, running or not; None when there is no record or it cannot be read."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_LARGEST))
        numbers = {key: value[key] for key in ("supervisor", "guard")}
        times = {key: value[key] for key in ("supervisor_started", "guard_started")}
        texts = {key: value[key] for key in ("url", "name", "log", "key_source")}
        if (
            value["phase"] not in ("starting", "ready")
            or not all(type(number) is int and number > 1 for number in numbers.values())
            or not all(type(time) in (int, float) for time in times.values())
            or not all(isinstance(text, str) for text in texts.values())
        ):
            return None
        return ServerState(phase=value["phase"], **numbers, **times, **texts)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_state(path: Path) -> None:
    path.unlink(missing_ok=True)
