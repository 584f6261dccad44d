"""A faulty hub with one small set, and short ways to fetch from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from glm5deploy.hub.client import Hub
from glm5deploy.hub.download import Download
from glm5deploy.hub.faults import Policy
from glm5deploy.hub.plan import FetchPlan, make_plan, write_plan
from glm5deploy.progress import Progress
from tests.support.faulty_hub import FaultyHub
from tests.support.shard_sets import write_set

os.environ.setdefault("DO_NOT_TRACK", "1")  # read by huggingface_hub at import: tests ask nobody but their own hub

REPO = "owner/model-GGUF"
QUANT = "UD-Q4_K_XL"
SIZES = [300_000, 1_500_000, 700_001]
QUICK = Policy(parallel=2, stall_rate=50_000, stall_seconds=3.0, retries=4, backoff=0.01, transport="https")
STALLS = 0.5
"""``stall_seconds`` for tests that stall on purpose; a busy machine must not look like one in the others."""


@dataclass
class Fetcher:
    """Fetches ``REPO:QUANT`` from the faulty hub into ``destination`` and keeps what was said on the way."""

    server: FaultyHub
    source: Path
    destination: Path
    policy: Policy = QUICK
    notes: list[str] = field(default_factory=list)
    proved: list[str] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)

    def hub(self, **options: object) -> Hub:
        return Hub(endpoint=self.server.endpoint, **options)  # type: ignore[arg-type]

    def plan(self) -> FetchPlan:
        plan = make_plan(self.hub(), REPO, QUANT, self.destination).plan
        write_plan(plan, self.destination)
        return plan

    def run(self, *, adopt: Path | None = None, later_bytes: int = 0, **policy: object) -> tuple[Path, ...]:
        return Download(
            self.hub(),
            self.plan(),
            self.destination,
            replace(self.policy, **policy),  # type: ignore[arg-type]
            adopt=adopt,
            later_bytes=later_bytes,
            progress=self.progress.append,
            note=self.notes.append,
            proved=lambda file: self.proved.append(file.name),
        ).run()

    def originals(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.source / QUANT).iterdir())]

    def fetched(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((self.destination / QUANT).glob("*.gguf"))]

    def partial(self, number: int) -> Path:
        return self.destination / ".fetch" / QUANT / f"m-{number:05d}-of-{len(SIZES):05d}.gguf.partial"

    @property
    def set_bytes(self) -> int:
        return sum(len(content) for content in self.originals())


@pytest.fixture
def fetcher(tmp_path: Path) -> Iterator[Fetcher]:
    source = tmp_path / "source"
    write_set(source / QUANT, "m", SIZES)
    with FaultyHub() as server:
        server.publish(REPO, source)
        yield Fetcher(server, source, tmp_path / "work")
        assert server.forget_faults() == 0, "a fault was prepared that no request met"
