"""Records of success: ``<workdir>/.glm5deploy/<stage>.json``, one a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from glm5deploy.files import read_json, sync_folder, write_json
from glm5deploy.pipeline.stage import Json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What a stage was given, what it made, and when. Exists only after success."""

    inputs: Json
    outputs: Json
    finished: str
    """UTC, ISO 8601."""
    seconds: float
    version: str
    """Of glm5deploy."""


class State:
    """The records of one work folder. An unreadable record counts as absent; ``warn`` is told its name."""

    def __init__(self, workdir: Path, warn: Callable[[str], None]) -> None:
        self.folder = workdir / ".glm5deploy"
        self._warn = warn

    def path(self, stage: str) -> Path:
        return self.folder / f"{stage}.json"

    def read(self, stage: str) -> Record | None:
        path = self.path(stage)
        try:
            value = read_json(path)
            if value is None:
                return None
            if value.pop("format", None) != FORMAT:
                raise ValueError("written by another version of the format")
            record = Record(**value)  # type: ignore[arg-type]
            if not isinstance(record.inputs, dict) or not isinstance(record.outputs, dict):
                raise ValueError("inputs and outputs must be objects")
            return record
        except (OSError, ValueError, TypeError) as error:
            self._warn(f"{path} is not a valid record ({error}); treating the stage as not done")
            return None

    def write(self, stage: str, record: Record) -> None:
        write_json(self.path(stage), {"format": FORMAT, **{f.name: getattr(record, f.name) for f in fields(record)}})

    def remove(self, stage: str) -> bool:
        """Forget a success, durably. True when there was one."""
        try:
            self.path(stage).unlink()
        except FileNotFoundError:
            return False
        sync_folder(self.folder)
        return True
