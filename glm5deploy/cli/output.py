"""The only place that prints. Data go to stdout, everything else to stderr; ``--json`` prints one object.

On a terminal long work has progress bars; in a pipe it is a line every few seconds. With ``--json`` events are JSON
lines on stderr. No colour codes leave this module unless the stream is a terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from glm5deploy.cli.text import cell, human_seconds, lines
from glm5deploy.progress import Progress
from glm5deploy.sizes import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from glm5deploy.pipeline.events import Event

SECONDS_BETWEEN_LINES = 5.0


class Output:
    def __init__(self, *, json_mode: bool = False) -> None:
        self.json_mode = json_mode
        self._meters: dict[str, _Meter] = {}
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}

    def result(self, value: Mapping[str, object], text: str | None = None) -> None:
        """The command's one result: the object as JSON, or ``text``, or the object as lines and tables."""
        self.close()
        if self.json_mode:
            print(json.dumps(value, ensure_ascii=False, default=str), flush=True)
        elif text is not None:
            print(printable(text), flush=True)
        else:
            self._show(value)

    def error(self, message: str, hint: str | None, exit_code: int) -> None:
        self.close()
        if self.json_mode:
            error = {"error": {"message": message, "hint": hint, "exit_code": exit_code}}
            print(json.dumps(error, ensure_ascii=False), flush=True)
            return
        self._say(f"error: {message}", "bold red")
        if hint:
            self._say(f"hint: {hint}", "cyan")

    def note(self, message: str) -> None:
        if not self.json_mode:
            self._say(message, None)

    def warning(self, message: str) -> None:
        if not self.json_mode:
            self._say(f"warning: {message}", "yellow")

    def piece(self, text: str, *, thinking: bool = False) -> None:
        """Part of a streamed answer, without a line end: the answer on stdout, thinking on stderr, dim on a terminal.

        What a model writes is not trusted: control characters do not reach a terminal.
        """
        stream = sys.stderr if thinking else sys.stdout
        if stream.isatty():
            text = printable(text)
            text = f"\x1b[2m{text}\x1b[0m" if thinking and text and "NO_COLOR" not in os.environ else text
        print(text, end="", file=stream, flush=True)

    def progress(self, progress: Progress) -> None:
        """A :data:`~glm5deploy.progress.ProgressSink` for work outside the pipeline."""
        self._progress("", progress)

    def event(self, event: Event) -> None:
        """An :data:`~glm5deploy.pipeline.events.EventSink`."""
        if event.kind == "progress" and event.progress is not None:
            self._progress(event.stage, event.progress)
            return
        if self.json_mode:
            self._json_line(asdict(event))
            return
        if event.kind in ("finished", "failed"):
            self.close()
        words = {"up-to-date": "up to date", "started": "…", "finished": "done"}
        if event.kind == "failed":
            return  # the error boundary says it once
        text = event.message or words.get(event.kind, event.kind)
        if event.kind == "finished":
            text = f"done in {human_seconds(float(str(event.data.get('seconds', 0))))}"
        style = {"warning": "yellow", "finished": "green", "started": "bold"}.get(event.kind)
        prefix = "warning: " if event.kind == "warning" else ""
        self._say(f"{event.stage:<8} {prefix}{text}", style)

    def close(self) -> None:
        """Take progress bars off the terminal."""
        if self._bars is not None:
            self._bars.stop()
        self._bars = None
        self._tasks.clear()
        self._meters.clear()

    def _progress(self, stage: str, progress: Progress) -> None:
        meter = self._meters.setdefault(progress.task, _Meter(progress.done))
        if sys.stderr.isatty() and not self.json_mode:
            self._bar(progress, meter.text(progress))
        elif meter.due(progress):
            if self.json_mode:
                self._json_line({"stage": stage, "kind": "progress", "progress": asdict(progress)})
            else:
                self._say(f"{stage:<8} {progress.task}: {meter.text(progress)}".strip(), None)

    def _bar(self, progress: Progress, text: str) -> None:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._bars is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"))
            self._bars = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bars.start()
        if progress.task not in self._tasks:
            self._tasks[progress.task] = self._bars.add_task(escape(progress.task), text="")
        self._bars.update(
            self._tasks[progress.task],
            completed=progress.done,
            total=progress.total,
            text=escape(text),
            visible=progress.done < progress.total,
        )

    def _say(self, message: str, style: str | None) -> None:
        message = printable(message)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.text import Text

            console = self._bars.console if self._bars is not None else Console(stderr=True)
            console.print(Text(message, style=style or ""), soft_wrap=True)
        else:
            print(message, file=sys.stderr, flush=True)

    def _json_line(self, event: Mapping[str, object]) -> None:
        value = {key: item for key, item in event.items() if item}
        print(json.dumps(value, ensure_ascii=False, default=str), file=sys.stderr, flush=True)

    def _show(self, value: Mapping[str, object]) -> None:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(width=None if sys.stdout.isatty() else 120)
        for item in lines(value):
            if isinstance(item, str):
                console.print(Text(printable(item)), soft_wrap=True)
                continue
            table = Table(box=box.SIMPLE)
            for key, first in item[0].items():
                number = isinstance(first, (int, float)) and not isinstance(first, bool)
                table.add_column(key.replace("_", " "), justify="right" if number else "left", overflow="fold")
            for row in item:
                table.add_row(*(Text(printable(cell(key, entry))) for key, entry in row.items()))
            console.print(table)


def printable(text: str) -> str:
    """Without control characters: names in files and listings are not trusted to move a terminal's cursor."""
    return "".join(c for c in text if c in "\n\t" or c.isprintable())


class _Meter:
    """Rate and ETA of one task since it was first seen, and when its next line is due."""

    def __init__(self, done: int) -> None:
        self._begin = time.monotonic()
        self._first = done
        self._last_line = self._begin

    def due(self, progress: Progress) -> bool:
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        return progress.done < progress.total

    def text(self, progress: Progress) -> str:
        note = f" {progress.note}" if progress.note else ""
        if progress.unit == "seconds":
            return f"{human_seconds(progress.done)} of at most {human_seconds(progress.total)}{note}"
        rate = (progress.done - self._first) / max(time.monotonic() - self._begin, 1e-6)
        left = human_seconds((progress.total - progress.done) / rate) if rate > 0 else "unknown"
        if progress.unit == "bytes":
            done, total, speed = human_bytes(progress.done), human_bytes(progress.total), f"{human_bytes(rate)}/s"
        else:
            done, total, speed = str(progress.done), str(progress.total), f"{rate:.1f}/s"
        return f"{done} of {total}, {speed}, {left} left{note}"
