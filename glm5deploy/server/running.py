"""A server that is ready: where its files are, what was seen of it, how it is watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from glm5deploy.server.api_key import ApiKey
from glm5deploy.server.client import Client
from glm5deploy.server.evidence import IndexerCount
from glm5deploy.server.incident import explain, save_incident
from glm5deploy.server.process import ServerExited, ServerProcess
from glm5deploy.server.readiness import CheckResult
from glm5deploy.server.settings import ServeSettings
from glm5deploy.server.watchdog import Stalled, watch


@dataclass(frozen=True, slots=True)
class Places:
    """Files of a server in its work folder."""

    log: Path
    state: Path
    counters: Path
    incidents: Path

    @classmethod
    def of(cls, workdir: Path) -> Places:
        private = workdir / ".glm5deploy"
        return cls(
            workdir / "logs" / "serve.log", private / "server.json", private / "indexer", workdir / "logs" / "incidents"
        )


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What was seen when the server became ready. ``seconds`` from the start to ``/health``."""

    seconds: float
    backend: str
    kv_dtype: str
    kv_tokens: int
    context: int
    indexer: IndexerCount
    checks: tuple[CheckResult, ...]

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    @property
    def summary(self) -> str:
        """One line: backend, KV type, indexer, and how each check came out."""
        counted = (
            f"indexer ran {self.indexer.calls} times and left tokens out for {self.indexer.sparse_rows}"
            if self.indexer.ranks
            else "indexer calls are not counted on this backend"
        )
        checks = ", ".join(f"{check.name}: {check.outcome}" for check in self.checks)
        return f"{self.backend}, KV cache {self.kv_dtype}, {counted}; {checks}"


def no_gpus() -> str:
    return "no GPUs were looked at"


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that is ready; ``process.check()`` raises when it has ended."""

    settings: ServeSettings
    key: ApiKey | None
    process: ServerProcess
    report: ReadyReport
    incidents: Path
    gpu_state: Callable[[], str] = no_gpus

    @property
    def base_url(self) -> str:
        return self.settings.base_url

    @property
    def model(self) -> str:
        """The name that clients ask for."""
        return self.settings.name

    def wait(self) -> None:
        """Watch the server until Ctrl-C or SIGTERM.

        Raises ServerExited or Stalled, after what can be known about it was saved, with the folder in the message.
        """
        try:
            with self.client() as client:
                watch(self.process, client, self.settings.stall_seconds)
        except KeyboardInterrupt:
            return
        except (ServerExited, Stalled) as failure:
            living = [pid for pid in self.process.members() if pid != self.process.session]
            place = save_incident(self.incidents, failure.message, self.process.log, living, self.gpu_state())
            told = "".join(f"\n  {line}" for line in explain(place))
            raise type(failure)(f"{failure.message}{told}\n  saved in {place}", hint=failure.hint) from None

    def client(self, timeout: float = 300.0) -> Client:
        return Client(self.settings.base_url, self.settings.name, self.key.value if self.key else None, timeout)
