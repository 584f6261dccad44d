"""How a benchmark speaks: lines with the time, figures kept as they come, a budget of seconds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path


class Course:
    """What has been done and found so far, said with the time and kept in ``out``."""

    def __init__(self, out: Path, budget: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._budget, self._begun = out, budget, time.monotonic()
        self._report = (out / "report.txt").open("w")
        self.figures: dict[str, object] = {}
        self.failed: list[str] = []

    def say(self, line: str) -> None:
        text = f"[{time.monotonic() - self._begun:6.1f} s] {line}"
        print(text, flush=True)
        self._report.write(text + "\n")
        self._report.flush()

    def table(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.say(line)

    def keep(self, name: str, value: object) -> None:
        self.figures[name] = value
        (self.out / "stack.json").write_text(json.dumps(self.figures, indent=1))

    def left(self) -> float:
        return self._budget - (time.monotonic() - self._begun)

    def attempt(self, name: str, least: float, work: Callable[[], None]) -> None:
        """Do ``work`` if ``least`` seconds are left; what it raises is reported, and the course goes on."""
        if self.left() < least:
            self.say(f"{name}: left out, {self.left():.0f} s of the budget remain")
            return
        self.say(f"{name} …")
        try:
            work()
        except Exception as error:
            self.failed.append(name)
            self.say(f"{name} FAILED: {type(error).__name__}: {str(error)[-1500:]}")
