"""What the runner asks of a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from glm5deploy.config import Config
from glm5deploy.errors import DeployError
from glm5deploy.pipeline.events import StageEvents

Json = Mapping[str, object]
"""A JSON object: str, int, float, bool, None, lists and objects of these."""


class DamagedRecordError(DeployError):
    """A record lacks what its stage always writes."""

    def __init__(self, stage: str, key: str) -> None:
        super().__init__(
            f"the record of {stage} is damaged: it has no {key!r}",
            hint=f"glm5deploy reset {stage}, then run it again; files that are there are kept",
        )


class Outputs(dict[str, object]):
    """The recorded outputs of a stage; a key that is not there is an error for the user, not a defect."""

    def __init__(self, stage: str, values: Json) -> None:
        super().__init__(values)
        self.stage = stage

    def __missing__(self, key: str) -> object:
        raise DamagedRecordError(self.stage, key)


class Blocked(Exception):
    """Raised by ``inputs`` when an earlier stage has not succeeded yet."""

    def __init__(self, by: str) -> None:
        super().__init__(by)
        self.by = by


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage may look at. ``outputs`` holds the outputs of the earlier stages that have a record."""

    workdir: Path
    config: Config
    events: StageEvents
    outputs: Mapping[str, Json]

    def require(self, stage: str) -> Json:
        """The outputs of an earlier stage; raises :class:`Blocked` when it has none."""
        if stage not in self.outputs:
            raise Blocked(stage)
        return Outputs(stage, self.outputs[stage])

    @property
    def private(self) -> Path:
        """``<workdir>/.glm5deploy``, for journals and side files; exists while a stage runs."""
        return self.workdir / ".glm5deploy"


class Stage(Protocol):
    """One step of the pipeline. All state is in files; an instance holds only the options of this invocation."""

    @property
    def name(self) -> str: ...

    def inputs(self, context: Context) -> Json:
        """The fingerprint of everything the result depends on; cheap (no hashing, no network).

        Compared key by key with the record's: a difference makes the stage stale, with the key as the reason.
        """

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        """Why recorded outputs no longer hold (a file is missing, its size or mtime changed); cheap. Empty: they do."""

    def plan(self, context: Context) -> Json:
        """What ``run`` would do, for ``--dry-run``. Writes nothing."""

    def run(self, context: Context) -> Json:
        """Do the work, picking up what an interrupted run left, and return the outputs to record."""
