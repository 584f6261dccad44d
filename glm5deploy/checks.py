"""The outcome of one look at the machine, as a value: preflight, doctor and plan show lists of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from glm5deploy.errors import DeployError

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """``found`` is what was seen; ``remedy`` the next step, empty only when ``level`` is "ok"."""

    name: str
    level: Level
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level != "ok" and not self.remedy:
            raise ValueError(f"check {self.name!r} is {self.level!r} and names no remedy")


def require_no_failure(checks: Iterable[Check]) -> None:
    """Raise DeployError with every failed check in the message and the first one's remedy as the hint."""
    failed = [check for check in checks if check.level == "fail"]
    if failed:
        raise DeployError("; ".join(f"{check.name}: {check.found}" for check in failed), hint=failed[0].remedy)


def worst(checks: Iterable[Check]) -> Level:
    levels = {check.level for check in checks}
    return "fail" if "fail" in levels else "warn" if "warn" in levels else "ok"
