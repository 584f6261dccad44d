"""What every command needs: where to print, the work folder, the settings, the pipeline.

Every command's module imports this one, so what it needs itself is imported where it is used: help comes up at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.cli.output import Output

if TYPE_CHECKING:
    from glm5deploy.config import Config
    from glm5deploy.pipeline.events import Event
    from glm5deploy.pipeline.runner import Pipeline, StageResult
    from glm5deploy.pipeline.stage import Stage
    from glm5deploy.pipeline.status import Status


@dataclass(frozen=True, slots=True)
class Session:
    output: Output
    workdir: Path
    config: Config
    flags: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def open(
        cls, *, workdir: Path, config: Path | None, json_mode: bool, flags: Mapping[str, object] | None = None
    ) -> Session:
        """Settings from ``config`` (or the work folder's glm5deploy.toml), the environment and ``flags``."""
        from glm5deploy.cli.remembered import read_remembered
        from glm5deploy.config import load_config

        workdir = workdir.expanduser().absolute()
        beside = workdir / "glm5deploy.toml"
        file = config if config is not None else (beside if beside.is_file() else None)
        output = current_output(json_mode=json_mode)
        remembered = read_remembered(workdir, flags or {}, output.warning)
        return cls(output, workdir, load_config(file, os.environ, flags or {}, remembered), flags or {})

    def pipeline(self, *replacements: Stage) -> Pipeline:
        from glm5deploy.pipeline.events import Events
        from glm5deploy.pipeline.runner import Pipeline
        from glm5deploy.stages import all_stages

        return Pipeline(all_stages(*replacements), self.workdir, self.config, Events(self._remember, self.output.event))

    def execute(
        self,
        first: str | None,
        last: str | None,
        *replacements: Stage,
        force: bool = False,
        dry_run: bool = False,
    ) -> list[StageResult]:
        """Run (or, with ``dry_run``, plan) a range of stages and print the result."""
        pipeline = self.pipeline(*replacements)
        if dry_run:
            plans = pipeline.plans(first, last)
            self.output.result({p.name: {**status_words(p.status), **(p.plan or {})} for p in plans})
            return []
        results = pipeline.run(first, last, force=force)
        shown = {r.name: {"ran": r.ran, "seconds": r.seconds, **r.outputs} for r in results}
        text = "\n".join(f"{r.name:<8} {r.outputs.get('summary', 'done')}" for r in results)
        self.output.result(shown, text)
        return results

    def _remember(self, event: Event) -> None:
        """Keep the flags once a stage succeeded with them: under the lock, and never those of a refused command."""
        if event.kind in ("finished", "up-to-date"):
            from glm5deploy.cli.remembered import remember

            remember(self.workdir, self.flags)


def status_words(status: Status) -> dict[str, object]:
    """A status as words for people and JSON alike."""
    from glm5deploy.pipeline.status import BlockedBy, Stale

    if isinstance(status, Stale):
        return {"status": "to do", "reasons": list(status.reasons)}
    if isinstance(status, BlockedBy):
        return {"status": "waits", "reasons": [f"{status.stage} comes first"]}
    return {"status": "up to date", "reasons": []}


_output = Output()


def current_output(*, json_mode: bool | None = None) -> Output:
    """The process's one output; the error boundary prints to the same one the command chose."""
    global _output
    if json_mode is not None and json_mode != _output.json_mode:
        _output = Output(json_mode=json_mode)
    return _output
