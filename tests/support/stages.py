"""Small real stages over files, for testing the runner without hubs or engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.files import changed_file, file_facts, write_atomically
from glm5deploy.pipeline.stage import Context, Json


@dataclass
class AppendStage:
    """Writes its source's text plus its own name; the source is a file or the previous stage's output."""

    name: str
    source: str
    fails: bool = False
    ran: list[str] = field(default_factory=list)

    def _source(self, context: Context) -> Path:
        if self.source.startswith("stage:"):
            return Path(str(context.require(self.source.removeprefix("stage:"))["path"]))
        return Path(self.source)

    def inputs(self, context: Context) -> Json:
        if self.source.startswith("stage:"):
            return {"source": context.require(self.source.removeprefix("stage:"))}
        return {"source": Path(self.source).read_text(), "port": context.config.serve.port}

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        reason = changed_file(outputs)
        return [reason] if reason else []

    def plan(self, context: Context) -> Json:
        return {"would_write": str(context.workdir / self.name)}

    def run(self, context: Context) -> Json:
        self.ran.append(self.name)
        context.events.checkpoint("half way")
        if self.fails:
            raise DeployError("no luck", hint="try again")
        target = context.workdir / self.name
        write_atomically(target, f"{self._source(context).read_text()}+{self.name}".encode())
        context.events.checkpoint("written")
        return file_facts(target)
