"""On a CUDA GPU: served numbers of every way to run our backend against the references, with CUDA graphs on.

All servers of the selected tests start side by side (`tests/support/gpu_servers.py`), each with a small share of the
memory; run with ``pytest -m gpu tests/vllm_plugin/test_gpu.py -s``. Weights are served as the file has them unless a
run says otherwise.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from statistics import median

import pytest

import glm5deploy
from tests.support.compare import check_steps, logprob_limit, logprob_median, selected_difference
from tests.support.drafts import ACCEPTED_SHARE, ask_drafts, draft_selection
from tests.support.engine import Answer
from tests.support.goldens import PROMPTS, Reference, prompts, references
from tests.support.gpu_servers import (
    PACKED,
    GpuRun,
    Loaded,
    Result,
    ask_lengths,
    ask_prompts,
    ask_together,
    ask_under_pressure,
    bf16,
)
from tests.support.oracle import Oracle, State, answer_differences, oracle_of, step_differences
from tests.vllm_plugin.conftest import Recording

pytestmark = pytest.mark.gpu

DENSE = ("--model-loader-extra-config", json.dumps({"weights": "dense"}))
DRAFT = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2}))
CRAMPED = ("--max-num-batched-tokens", "128", "--num-gpu-blocks-override", "48")  # a cache of 3,072 tokens

# By default in as few launches as there are; these leave all, or what is around experts and attention, to vLLM.
UNFUSED, NORMS = (("--additional-config", json.dumps({"glm5_fusion": level})) for level in ("off", "norms"))


@cache
def numerics() -> subprocess.CompletedProcess[str]:
    """The probe that ``install`` runs; where servers are started it runs beside them."""
    command = [sys.executable, "-m", "glm5deploy.vllm_plugin.probe", "--json", "--numerics"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, start_new_session=True)


ALL = (ask_prompts, ask_together, ask_lengths)
RUNS = (
    GpuRun("A", bf16("A"), ALL, empty_cache=True, prepare=numerics),
    GpuRun("A-mtp", bf16("A"), (*ALL, ask_drafts), flags=DRAFT),
    GpuRun("A-fp8-cache", bf16("A"), ALL, flags=PACKED),
    GpuRun("B-Q4", bf16("B-Q4"), ALL),
    GpuRun("B-Q8", bf16("B-Q8"), ALL),
    GpuRun("B-Q8-fp8-cache", bf16("B-Q8"), (ask_prompts, ask_together), flags=PACKED),
    GpuRun("A-cramped", bf16("A"), (ask_prompts, ask_together, ask_under_pressure), flags=CRAMPED),
    GpuRun("A-dense", bf16("A"), (ask_prompts, ask_together), flags=DENSE),
    GpuRun("B-Q8-unfused", bf16("B-Q8"), ALL, flags=UNFUSED),
    GpuRun("B-Q8-norms", bf16("B-Q8"), ALL, flags=NORMS),
)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)


def recorded(results: dict[str, Result], run: GpuRun) -> Recording:
    result = results[run.name]
    assert result.record is not None, result.failure
    return result.record


def check_prompts(run: GpuRun, results: dict[str, Result]) -> None:
    """Every compared position of the prompts, within the data set's tolerance.

    How far a server with a packed cache is from a forward pass that packs its latents is printed beside.
    """
    answers = recorded(results, run).answers
    expected = references(run.run.key, run.expected)
    medians = {name: round(logprob_median(expected[name], answers[name].top), 4) for name in PROMPTS}
    print(f"{run.name}: start {results[run.name].seconds:.0f} s, prompts {[*medians.values()]}")
    if run.packed:
        oracle = oracle_of(run.run.key, run.topk, run.packed)
        packed = [round(prompt_median(oracle, name, expected[name], answers[name]), 4) for name in PROMPTS]
        print(f"{run.name}: against a packed forward pass {packed}")
    limits = {name: logprob_limit("bfloat16", len(prompts()[name].ids)) for name in PROMPTS}
    assert all(medians[name] <= limits[name] for name in PROMPTS), medians


def prompt_median(oracle: Oracle, name: str, reference: Reference, answer: Answer) -> float:
    positions = sorted(reference.top)
    logprobs = oracle.extend(State(), prompts()[name].ids)[positions]
    return median(d for step in step_differences(logprobs, [answer.top[p] for p in positions]) for d in step)


def check_loaded(run: GpuRun, loaded: Loaded, result: Result) -> None:
    """Decoded steps of requests that ran side by side are those of a forward pass over the same tokens."""
    assert loaded, result.failure
    oracle = oracle_of(run.run.key, run.topk, run.packed)
    print(run.name, check_steps([answer_differences(oracle, *request) for request in loaded], run.run.dtype))


@every_run
def test_prompts_match_the_reference(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    check_prompts(run, gpu_results)


@every_run
def test_selections_are_near_the_reference(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """The hidden states are bf16, so more positions near the limit change places than in fp32."""
    record = recorded(gpu_results, run)
    averages = {
        name: round(selected_difference(reference, record.selections[name][0]), 2)
        for name, reference in references(run.run.key, run.expected).items()
        if reference.selected
    }
    print(f"{run.name}: of {run.topk} positions differ {averages}")
    assert all(average <= run.topk / 10 for average in averages.values()), averages


@every_run
def test_decoded_steps_match_a_forward_pass(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """One request at a time: steps of one token, or of a token and its drafts."""
    answers = recorded(gpu_results, run).answers
    check_loaded(run, [(prompts()[name].ids, answers[name]) for name in PROMPTS], gpu_results[run.name])


@every_run
def test_requests_side_by_side_match_a_forward_pass(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    check_loaded(run, gpu_results[run.name].together, gpu_results[run.name])


@pytest.mark.parametrize("run", [r for r in RUNS if ask_under_pressure in r.tasks], ids=lambda r: r.name)
def test_preempted_requests_match_a_forward_pass(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    result = gpu_results[run.name]
    check_loaded(run, result.preempted, result)
    print(f"{run.name}: {result.preemptions:.0f} preemptions")
    assert result.preemptions >= 3


@pytest.mark.parametrize("run", [r for r in RUNS if ask_drafts in r.tasks], ids=lambda r: r.name)
def test_the_draft_model_selects_and_drafts_as_it_should(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    result = gpu_results[run.name]
    record = recorded(gpu_results, run)
    averages = {
        name: round(draft_selection(run.run.key, run.topk, name, record.answers[name], record.selections[name][0]), 2)
        for name in ("p130", "p300", "p700")
    }
    print(f"{run.name}: of {run.topk} positions of the draft layer differ {averages}, accepted {result.accepted}")
    assert all(average <= run.topk / 10 for average in averages.values()), averages
    assert result.accepted["known drafts"] >= ACCEPTED_SHARE * result.accepted["known prompts"]


def our_kernels() -> frozenset[str]:
    """Names of the functions under ``triton.jit`` in this package."""
    package = Path(glm5deploy.__file__).parent
    sources = [file.read_text() for part in ("kernels", "quants") for file in (package / part).glob("*.py")]
    return frozenset(name for text in sources for name in re.findall(r"@triton\.jit(?:\([^)]*\))?\s*def (\w+)", text))


@pytest.mark.parametrize("run", [r for r in RUNS if ask_lengths in r.tasks], ids=lambda r: r.name)
def test_nothing_of_ours_is_compiled_after_the_warm_up(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """Seen by our own log, from the warm-up's end on, and by vLLM's monitor, from the graph capture's end on."""
    result = gpu_results[run.name]
    recorded(gpu_results, run)
    phases = [line["phase"] for line in result.compiled]
    late = sorted({line["kernel"] for line in result.compiled if line["phase"] != "warm-up"})
    print(f"{run.name}: {phases.count('warm-up')} variants prepared in the warm-up, later {late}")
    assert "warm-up" in phases
    assert not late
    monitored = set(re.findall(r"Triton kernel JIT compilation during inference: (\w+)", result.log))
    assert "Kernel JIT monitor activated" in result.log
    assert not monitored & our_kernels(), sorted(monitored & our_kernels())


@every_run
def test_our_backend_ran_and_captured_its_graphs(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    recorded(gpu_results, run)
    log = gpu_results[run.name].log
    assert "GLM5_TRITON_SPARSE" in log
    assert "Graph capturing finished" in log or "Capturing CUDA graphs" in log
    assert ("of quantised weights read in" in log) == (run.flags != DENSE)
    # Before attention, or around routed experts: of dense experts, whose products are vLLM's.
    own = set(re.findall(r"vLLM's own operations run (.*)", log))
    assert own == ({"around routed experts: experts are not of our kind"} if run.flags == DENSE else set())
    # Router products for activations of one type, 32 of them, and not of two; a draft model has kernels besides.
    assert "LLFp32WGemm (32 keys)" in log


def test_the_backend_computes_what_its_reference_computes() -> None:
    child = numerics()
    print(child.stdout[-1500:])
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
