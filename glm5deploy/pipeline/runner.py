"""The one way stages are run, by ``run`` and by every single-stage command alike."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from glm5deploy import __version__
from glm5deploy.config import Config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.pipeline.events import Event, Events, StageEvents
from glm5deploy.pipeline.lock import work_lock
from glm5deploy.pipeline.stage import Blocked, Context, Json, Stage
from glm5deploy.pipeline.state import Record, State
from glm5deploy.pipeline.status import Status, UpToDate, stage_status


@dataclass(frozen=True, slots=True)
class StageResult:
    name: str
    ran: bool
    """False: it was up to date."""
    seconds: float
    outputs: Json


@dataclass(frozen=True, slots=True)
class StagePlan:
    name: str
    status: Status
    plan: Json | None
    """None where an earlier stage must run first."""


class Pipeline:
    """Stages in order over one work folder."""

    def __init__(self, stages: Sequence[Stage], workdir: Path, config: Config, events: Events) -> None:
        self.stages = tuple(stages)
        self.workdir = workdir
        self._config = config
        self._events = events
        self.state = State(workdir, lambda message: events.emit(Event("state", "warning", message)))

    def statuses(self) -> dict[str, Status]:
        """Every stage's status, from the records alone; changes nothing."""
        records = self._records()
        return {s.name: stage_status(s, self._context(s, records), records.get(s.name)) for s in self.stages}

    def plans(self, first: str | None = None, last: str | None = None) -> list[StagePlan]:
        """What :meth:`run` would do now; changes nothing."""
        records = self._records()
        plans = []
        for stage in self._selected(first, last):
            context = self._context(stage, records)
            status = stage_status(stage, context, records.get(stage.name))
            try:
                plans.append(StagePlan(stage.name, status, stage.plan(context)))
            except Blocked:
                plans.append(StagePlan(stage.name, status, None))
        return plans

    def run(self, first: str | None = None, last: str | None = None, *, force: bool = False) -> list[StageResult]:
        """Run the stages from ``first`` to ``last`` that are not up to date (all of them with ``force``).

        :raises DeployError: of the stage that failed; earlier successes stay recorded.
        """
        selected = self._selected(first, last)
        with work_lock(self.workdir):
            return [self._run_stage(stage, force) for stage in selected]

    def reset(self, name: str) -> bool:
        """Forget that a stage succeeded. Files it made stay. True when there was a record."""
        self._index(name)
        with work_lock(self.workdir):
            return self.state.remove(name)

    def _run_stage(self, stage: Stage, force: bool) -> StageResult:
        records = self._records()
        context = self._context(stage, records)
        try:
            status = stage_status(stage, context, records.get(stage.name))
            if isinstance(status, UpToDate) and not force:
                self._events.emit(Event(stage.name, "up-to-date"))
                return StageResult(stage.name, False, 0.0, status.record.outputs)
            inputs = stage.inputs(context)
        except Blocked as blocked:
            raise DeployError(
                f"{stage.name} needs {blocked.by}, which has not succeeded in {self.workdir}",
                hint=f"glm5deploy run --until {stage.name} --workdir {self.workdir}",
            ) from None
        self.state.remove(stage.name)
        self._events.emit(Event(stage.name, "started"))
        begun = time.monotonic()
        try:
            outputs = stage.run(context)
        except BaseException as error:
            earlier = records.get(stage.name)
            if earlier is not None and not context.events.changed:
                self.state.write(stage.name, earlier)  # refused before it touched anything: what there was still holds
            self._events.emit(Event(stage.name, "failed", str(error) or type(error).__name__))
            raise
        seconds = round(time.monotonic() - begun, 3)
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        self.state.write(stage.name, Record(inputs, outputs, finished, seconds, __version__))
        self._events.emit(Event(stage.name, "finished", data={"seconds": seconds}))
        return StageResult(stage.name, True, seconds, outputs)

    def _records(self) -> dict[str, Record]:
        found = ((stage.name, self.state.read(stage.name)) for stage in self.stages)
        return {name: record for name, record in found if record is not None}

    def _context(self, stage: Stage, records: Mapping[str, Record]) -> Context:
        earlier = self.stages[: self._index(stage.name)]
        outputs = {s.name: records[s.name].outputs for s in earlier if s.name in records}
        return Context(self.workdir, self._config, StageEvents(self._events, stage.name), outputs)

    def _selected(self, first: str | None, last: str | None) -> tuple[Stage, ...]:
        begin = self._index(first) if first else 0
        end = self._index(last) if last else len(self.stages) - 1
        if begin > end:
            raise UsageError(f"{first} comes after {last}", hint=f"the order is {self._order()}")
        return self.stages[begin : end + 1]

    def _index(self, name: str) -> int:
        for index, stage in enumerate(self.stages):
            if stage.name == name:
                return index
        raise UsageError(f"there is no stage {name!r}", hint=f"the stages are {self._order()}")

    def _order(self) -> str:
        return " → ".join(stage.name for stage in self.stages)
