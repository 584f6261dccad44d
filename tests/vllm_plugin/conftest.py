"""Model folders over the reference sets, and servers over those, each started once a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from glm5deploy.gguf_files.copy import merge
from tests.support.compare import decode_median
from tests.support.engine import Answer, Engine, engine
from tests.support.folders import write_folder_of
from tests.support.goldens import PROMPTS, SETS, prompts

if TYPE_CHECKING:
    from tests.support.gpu_servers import Result

Layout = Literal["shards", "merged"]
STEPS = 8  # greedy tokens a prompt


@dataclass(frozen=True)
class Run:
    """One server: a reference set, its layout on disk, ranks and type; ``change`` alters config.json (controls).

    ``machines`` share the ranks, as vLLM has it for several; here they are all this one.
    """

    key: str
    layout: Layout = "shards"
    tp: int = 1
    dtype: str = "float32"
    schedule: str | None = None
    change: tuple[tuple[str, Any], ...] = ()
    machines: int = 1

    def __str__(self) -> str:
        extra = [
            f"{self.machines}machines" * (self.machines > 1),
            self.schedule or "",
            *(f"{name}={value}" for name, value in self.change),
        ]
        return "-".join([self.key, self.layout, f"tp{self.tp}", self.dtype, *filter(None, extra)])


@dataclass
class Recording:
    """What a server answered to every prompt, one after the other, and what its indexer selected.

    ``prompted`` are the prompts with the tokens that were decoded after them, now all of it a prompt.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    prompted: dict[str, Answer] = field(default_factory=dict)
    selections: dict[str, list[dict[tuple[int, int], frozenset[int]]]] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Path]:
    """Writes the model folder of a run; merged files are made once a set."""
    merged: dict[str, Path] = {}

    def build(run: Run) -> Path:
        chosen = SETS[run.key]
        gguf = chosen.path
        if run.layout == "merged" and gguf.is_dir():
            if run.key not in merged:
                merged[run.key] = tmp_path_factory.mktemp("merged") / f"{run.key}.gguf"
                merge(gguf, merged[run.key])
            gguf = merged[run.key]
        folder = tmp_path_factory.mktemp("model")
        write_folder_of(gguf, folder, schedule=run.schedule or chosen.schedule_option)
        if run.change:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, **dict(run.change)}))
        return folder

    return build


@pytest.fixture(scope="session")
def recording(
    model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Run], Recording]:
    """Starts the run's server, records all prompts, stops it; the second call returns the first one's record."""
    kept: dict[Run, Recording] = {}

    def record(run: Run) -> Recording:
        if run not in kept:
            work, nodes = tmp_path_factory.mktemp("engine"), ({},) * run.machines if run.machines > 1 else ()
            with engine(model_folder(run), work, tp=run.tp, dtype=run.dtype, nodes=nodes) as served:
                kept[run] = record_prompts(served, run.tp)
        return kept[run]

    return record


@pytest.fixture(scope="session")
def gpu_results(
    request: pytest.FixtureRequest, model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """What the servers of every GPU run answered that a selected test asks for: ``-k`` starts none in vain.

    A run whose reference set is not here fails alone.
    """
    from tests.support.gpu_servers import GpuRun, Result, serve_all, visible_gpus

    specs = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {spec.params["run"]: None for spec in specs if spec is not None and "run" in spec.params}
    gpus = visible_gpus()
    runs = [run for run in asked if isinstance(run, GpuRun) and gpus]
    folders: dict[str, tuple[Path, Path]] = {}
    missing: dict[str, Result] = {}
    for run in runs:
        try:
            folders[run.name] = model_folder(run.run), tmp_path_factory.mktemp("engine")
        except FileNotFoundError as error:
            missing[run.name] = Result(failure=str(error))
    return serve_all([run for run in runs if run.name in folders], folders, gpus) | missing


def record_prompts(served: Engine, tp: int) -> Recording:
    result = Recording()
    for name in PROMPTS:
        served.clear_trace()
        result.answers[name] = served.complete(prompts()[name].ids, tokens=STEPS)
        result.selections[name] = [served.selections(rank) for rank in range(tp)]
        result.prompted[name] = served.complete(prompts()[name].ids + result.answers[name].ids, tokens=1)
    result.counts = {file.name: json.loads(file.read_text()) for file in served.status.glob("*.json")}
    return result


def decode_medians(record: Recording) -> dict[str, float]:
    """:func:`decode_median` of every prompt; the first token is left out, as the prompt's own prefill gave it."""
    found = {}
    for name in PROMPTS:
        length = len(prompts()[name].ids)
        decoded = {position: top for position, top in record.answers[name].top.items() if position >= length}
        found[name] = decode_median(decoded, record.prompted[name].top)
    return found
