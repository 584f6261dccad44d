"""Whether a stage's success still holds, as a value with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glm5deploy.errors import DeployError
from glm5deploy.pipeline.stage import Blocked, Context, Json, Outputs, Stage
from glm5deploy.pipeline.state import Record


@dataclass(frozen=True, slots=True)
class UpToDate:
    record: Record


@dataclass(frozen=True, slots=True)
class Stale:
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockedBy:
    stage: str


Status = UpToDate | Stale | BlockedBy


def stage_status(stage: Stage, context: Context, record: Record | None) -> Status:
    """Compare the record with the present inputs, then with cheap facts about the recorded outputs."""
    try:
        inputs = stage.inputs(context)
    except Blocked as blocked:
        return BlockedBy(blocked.by)
    except DeployError as error:
        return Stale((error.message,))
    if record is None:
        return Stale(("has not succeeded yet",))
    reasons = input_changes(record.inputs, inputs)
    if not reasons:
        try:
            reasons = stage.stale_outputs(context, Outputs(stage.name, record.outputs))
        except DeployError as error:
            reasons = [error.message]
    return Stale(tuple(reasons)) if reasons else UpToDate(record)


def input_changes(before: Json, now: Json) -> list[str]:
    """One reason for every key that differs, appeared or went."""
    reasons = []
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            reasons.append(f"{key} changed{_from_to(before.get(key), now.get(key))}")
    return reasons


def _from_to(before: object, now: object) -> str:
    if isinstance(before, (Mapping, list)) or isinstance(now, (Mapping, list)):
        return ""
    return f" from {_short(before)} to {_short(now)}"


def _short(value: object) -> str:
    text = "nothing" if value in (None, "") else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
