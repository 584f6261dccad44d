"""On a CUDA GPU: served numbers of our backend and of vLLM's own against the references, with CUDA graphs on.

All servers are started side by side, each with a small share of the memory; run with
``pytest -m gpu tests/vllm_plugin/test_gpu.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.compare import (
    DECODE_MEDIAN,
    comparable_steps,
    logprob_limit,
    logprob_median,
    selected_difference,
)
from tests.support.engine import Engine, engine
from tests.support.goldens import PROMPTS, prompts, references
from tests.vllm_plugin.conftest import Recording, Run, decode_medians, record_prompts

pytestmark = pytest.mark.gpu

# The cache's size is given: profiling it would count what the servers beside this one allocate meanwhile.
SMALL = ("--kv-cache-memory-bytes", str(2 << 30), "--max-num-seqs", "16", "--disable-flashinfer-autotune")
SMALL += ("--gpu-memory-utilization", "0.2")
SIDE_BY_SIDE = 4
TOPK_128 = (("index_topk", 128),)


@dataclass(frozen=True)
class GpuRun:
    """One server: what is loaded, which expected results it is compared with, and what is special about it."""

    name: str
    run: Run
    expected: str = "topk64/fp8"
    flags: tuple[str, ...] = ()
    selections: bool = True


def bf16(key: str, change: tuple[tuple[str, Any], ...] = ()) -> Run:
    return Run(key, dtype="bfloat16", change=change)


RUNS = (
    GpuRun("A", bf16("A")),
    GpuRun("B-Q4", bf16("B-Q4")),
    GpuRun("B-Q8", bf16("B-Q8")),
    GpuRun("A-fp8-cache", bf16("A"), flags=("--kv-cache-dtype", "fp8_ds_mla")),
    GpuRun("B-Q8-fp8-cache", bf16("B-Q8"), flags=("--kv-cache-dtype", "fp8_ds_mla")),
    GpuRun("A-small-steps", bf16("A"), flags=("--max-num-batched-tokens", "128")),
    GpuRun("A-topk128", bf16("A", TOPK_128), expected="topk128/fp8"),
    GpuRun(
        "A-topk128-native",
        bf16("A", TOPK_128),
        expected="topk128/fp8",
        flags=("--attention-backend", "FLASHMLA_SPARSE"),
        selections=False,
    ),
    GpuRun(
        "A-mtp",
        bf16("A"),
        flags=("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2})),
        selections=False,
    ),
)


@dataclass
class Result:
    """``failure`` is why a server gave no record; ``seconds`` its start."""

    record: Recording | None = None
    failure: str = ""
    seconds: float = 0.0
    log: str = ""
    batch: list[list[int]] = field(default_factory=list)


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest,
    model_folder: Callable[[Run], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Result]:
    """The record of every run that a selected test asks for, so that ``-k`` starts no server in vain."""
    specs = (getattr(item, "callspec", None) for item in request.session.items)
    asked = {spec.params.get("run") for spec in specs if spec is not None}
    runs = [run for run in RUNS if run in asked]
    folders = {r.name: (model_folder(r.run), tmp_path_factory.mktemp("engine")) for r in runs}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        found = pool.map(lambda r: (r.name, _serve(r, *folders[r.name])), runs)
        return dict(found)


def _serve(run: GpuRun, folder: Path, work: Path) -> Result:
    result = Result()
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            served = stack.enter_context(engine(folder, work, dtype=run.run.dtype, flags=(*SMALL, *run.flags)))
            result.seconds = time.monotonic() - begun
            result.record = record_prompts(served, 1)
            result.batch = _together(served)
    except AssertionError as error:
        result.failure = str(error)[-3000:]
    result.log = (work / "serve.log").read_text(errors="replace")
    return result


def _together(served: Engine) -> list[list[int]]:
    """All prompts three times over at once: decode and prefill share steps, prefixes come from the cache."""
    wanted = [prompts()[name].ids for name in PROMPTS] * 3
    with ThreadPoolExecutor(len(wanted)) as pool:
        answers = pool.map(lambda ids: served.complete(ids, tokens=16, prompt_logprobs=False).ids, wanted)
        return list(answers)


def check_greedy(run: GpuRun, result: Result) -> None:
    """Tokens are the reference's as long as it is sure of them."""
    assert result.record is not None, result.failure
    for name, reference in references(run.run.key, run.expected).items():
        ids = result.record.answers[name].ids
        steps = min(comparable_steps(reference, run.run.dtype), len(ids))
        assert ids[:steps] == reference.greedy[:steps], name


def check_decoding(run: GpuRun, result: Result) -> None:
    """A decode step's log-probabilities are those that the same tokens have as parts of a prompt."""
    assert result.record is not None, result.failure
    found = {name: round(median, 4) for name, median in decode_medians(result.record).items()}
    print(f"{run.name}: decoded against prompted {found}")
    assert all(value <= DECODE_MEDIAN[run.run.dtype] for value in found.values()), found


def _record(results: dict[str, Result], run: GpuRun) -> Recording:
    result = results[run.name]
    assert result.record is not None, result.failure
    return result.record


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_logprobs_match_the_reference(run: GpuRun, results: dict[str, Result]) -> None:
    answers = _record(results, run).answers
    expected = references(run.run.key, run.expected)
    medians = {name: round(logprob_median(expected[name], answers[name].top), 4) for name in PROMPTS}
    print(f"{run.name}: start {results[run.name].seconds:.0f} s, medians {medians}")
    limits = {name: logprob_limit("bfloat16", len(prompts()[name].ids)) for name in PROMPTS}
    assert all(medians[name] <= limits[name] for name in PROMPTS), medians


@pytest.mark.parametrize("run", [r for r in RUNS if r.selections], ids=lambda r: r.name)
def test_selections_are_near_the_reference(run: GpuRun, results: dict[str, Result]) -> None:
    """The hidden states are bf16, so more positions near the limit change places than in fp32."""
    record = _record(results, run)
    topk = int(run.expected[len("topk") :].split("/")[0])
    averages = {
        name: round(selected_difference(reference, record.selections[name][0]), 2)
        for name, reference in references(run.run.key, run.expected).items()
        if reference.selected
    }
    print(f"{run.name}: of {topk} positions differ {averages}")
    assert all(average <= topk / 10 for average in averages.values()), averages


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_greedy_tokens_match_where_the_reference_is_sure(run: GpuRun, results: dict[str, Result]) -> None:
    check_greedy(run, results[run.name])


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_decode_steps_give_what_a_prompt_gives(run: GpuRun, results: dict[str, Result]) -> None:
    check_decoding(run, results[run.name])


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_requests_served_together_are_answered_like_one_alone(run: GpuRun, results: dict[str, Result]) -> None:
    """The first token, which no earlier rounding has steered, in most of 18 concurrent requests."""
    alone = [_record(results, run).answers[name].ids[0] for name in PROMPTS] * 3
    together = [ids[0] for ids in results[run.name].batch]
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    print(f"{run.name}: {same} of {len(alone)} first tokens equal")
    assert same >= len(alone) - 4
    assert all(len(ids) == 16 for ids in results[run.name].batch)


def test_the_backend_computes_what_its_reference_computes() -> None:
    command = [sys.executable, "-m", "glm5deploy.vllm_plugin.probe", "--json", "--numerics"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(child.stdout[-1500:])
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]


@pytest.mark.parametrize("run", [r for r in RUNS if "native" not in r.name], ids=lambda r: r.name)
def test_our_backend_ran_and_captured_its_graphs(run: GpuRun, results: dict[str, Result]) -> None:
    log = results[run.name].log
    assert "GLM5_TRITON_SPARSE" in log
    assert "Graph capturing finished" in log or "Capturing CUDA graphs" in log
