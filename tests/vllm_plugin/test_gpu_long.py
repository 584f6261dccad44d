"""On a CUDA GPU: contexts of up to 131,072 tokens through the engine, ours beside vLLM's own sparse attention.

True values come from a forward pass in fp32 on the same GPU (`tests/support/oracle.py`). One sequence of tokens serves
all lengths; prompts of one length share nothing with those of another until they are sent a second time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from statistics import mean, median

import pytest
import torch

from tests.support.compare import LOST_STEP, STEPS_MEDIAN, check_steps
from tests.support.engine import Answer, Engine
from tests.support.gpu_servers import PACKED, GpuRun, LongAnswer, Result, ask_prompts, bf16, random_prompt
from tests.support.oracle import State, decoded_steps, oracle_of, step_differences
from tests.vllm_plugin.test_gpu import check_prompts

pytestmark = pytest.mark.gpu

LENGTHS = (2047, 2048, 2049, 4096, 8192, 32768, 131072)
STEPS = 32
FAR = 64  # positions of context to one that is selected: beyond, the tolerances are wider
PROMPTED = 8192  # every position of this prompt is compared
SEED = 5
# Selections are looked at near the end of each prompt, and in the middle of the longest.
WATCHED = frozenset(n - back for n in LENGTHS for back in (1, 2, 65)) | {50000, 99999}


def ask_long(run: GpuRun, served: Engine, result: Result) -> None:
    ids = random_prompt(LENGTHS[-1], SEED)
    for length in LENGTHS:
        served.clear_trace()
        cold = served.complete(ids[:length], tokens=STEPS, prompt_logprobs=False, salt=str(length))
        selections = served.selections(positions=WATCHED)
        before = sum(served.counter("prefix_cache_hits").values())
        warm = served.complete(ids[:length], tokens=STEPS, prompt_logprobs=False, salt=str(length))
        hits = sum(served.counter("prefix_cache_hits").values()) - before
        result.long[length] = LongAnswer(cold, warm, hits, selections)
    served.clear_trace()
    result.prompted = served.complete(ids[:PROMPTED], tokens=1)


@dataclass(frozen=True)
class Truth:
    """The longest prompt's context, and log-probabilities after each position that a test compares."""

    state: State
    prompted: torch.Tensor
    last: dict[int, torch.Tensor]


@cache
def truth(topk: int, packed: bool) -> Truth:
    begun = time.monotonic()
    oracle, state = oracle_of("A", topk, packed), State(watched=WATCHED)
    hidden = oracle.hidden(state, random_prompt(LENGTHS[-1], SEED))
    last = {n: oracle.logprobs(hidden[n - 1 : n], "output_norm") for n in LENGTHS}
    kind = f"top-k {topk}, {'packed' if packed else 'plain'}"
    print(f"forward pass over {LENGTHS[-1]} tokens, {kind}: {time.monotonic() - begun:.0f} s", flush=True)
    return Truth(state, oracle.logprobs(hidden[:PROMPTED], "output_norm"), last)


LONG = ("--max-model-len", str(LENGTHS[-1] + 64))
NATIVE = ("--attention-backend", "FLASHMLA_SPARSE")
TASKS = (ask_prompts, ask_long)
TRUTH = {key: partial(truth, *key) for key in ((128, False), (2048, False), (2048, True))}


def long_run(name: str, topk: int, expected: str, *flags: str, native: bool = False) -> GpuRun:
    run = bf16("A", index_topk=topk)
    # Selections of a top-k of 2,048 would be gigabytes, and those of vLLM's own attention are not recorded.
    traced = topk == 128 and not native
    prepare = TRUTH[topk, PACKED[1] in flags]
    return GpuRun(name, run, TASKS, expected, (*LONG, *flags), native=native, traced=traced, prepare=prepare)


RUNS = (
    long_run("A-topk128", 128, "topk128/fp8"),
    long_run("A-topk128-native", 128, "topk128/fp8", *NATIVE, native=True),
    long_run("A-topk2048", 2048, "dense"),
    long_run("A-topk2048-fp8-cache", 2048, "dense", *PACKED),
)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)


def long_differences(run: GpuRun, length: int, answer: Answer) -> list[list[float]]:
    known, oracle = truth(run.topk, run.packed), oracle_of("A", run.topk, run.packed)
    later = oracle.extend(known.state.fork(length), answer.ids[:-1])
    return step_differences(torch.cat((known.last[length], later)), decoded_steps(length, answer))


def check_long(run: GpuRun, answers: dict[int, Answer]) -> None:
    """Every length's steps against a forward pass; far ones are judged apart."""
    found = {length: long_differences(run, length, answer) for length, answer in answers.items()}
    for length, steps in found.items():
        lost = sum(median(step) > LOST_STEP for step in steps)
        print(f"{run.name} at {length}: median {median(d for step in steps for d in step):.3f}, {lost} steps lost")
    near = [steps for length, steps in found.items() if length <= FAR * run.topk]
    far = [steps for length, steps in found.items() if length > FAR * run.topk]
    print(f"{run.name}, near:", check_steps(near, run.run.dtype))
    if far:
        print(f"{run.name}, far:", check_steps(far, "far"))


def long_answers(results: dict[str, Result], run: GpuRun) -> dict[int, LongAnswer]:
    result = results[run.name]
    assert len(result.long) == len(LENGTHS), result.failure
    return result.long


@every_run
def test_prompts_match_the_reference(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """With a top-k of 2,048 these are the results of dense attention."""
    check_prompts(run, gpu_results)


@every_run
def test_long_prompts_are_continued_as_in_a_forward_pass(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    check_long(run, {length: answer.cold for length, answer in long_answers(gpu_results, run).items()})


@every_run
def test_cached_prefixes_are_continued_as_in_a_forward_pass(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    answers = long_answers(gpu_results, run)
    cached = {length: answer.hits for length, answer in answers.items()}
    assert all(hits >= length - 128 for length, hits in cached.items()), cached
    check_long(run, {length: answer.warm for length, answer in answers.items()})


def test_another_selection_is_far_from_these_tolerances() -> None:
    """The control: a top-k of 2,048 against 128, both exact."""
    served = [dict(enumerate(row)) for row in truth(2048, False).prompted[4096:].tolist()]
    found = step_differences(truth(128, False).prompted[4096:], served)
    off = median(d for step in found for d in step)
    print(f"a top-k of 2048 is off by {off:.2f} from one of 128")
    assert off > STEPS_MEDIAN["far"][0]


@every_run
def test_every_position_of_a_long_prompt_matches(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """8,192 positions in one step; positions below and above top-k are judged apart."""
    served = gpu_results[run.name].prompted
    assert served is not None, gpu_results[run.name].failure
    found = step_differences(truth(run.topk, run.packed).prompted[:-1], [served.top[p] for p in range(PROMPTED - 1)])
    bounds = [0, 128, 2048, 4096, PROMPTED - 1]
    for first, last in pairwise(bounds):
        print(f"{run.name} positions {first} to {last}:", check_steps([found[first:last]], run.run.dtype))


@pytest.mark.parametrize("run", [r for r in RUNS if r.traced], ids=lambda r: r.name)
def test_long_contexts_select_what_a_forward_pass_selects(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    expected = truth(run.topk, False).state.selected
    for length, answer in long_answers(gpu_results, run).items():
        shared = [key for key in answer.selections if key[1] < length]
        assert {position for _, position in shared} == {p for p in WATCHED if p < length}
        assert {layer for layer, _ in shared} == {0, 1, 2, 3}
        assert all(len(answer.selections[key]) == min(run.topk, key[1] + 1) for key in shared)
        off = mean(len(answer.selections[key] - expected[key]) for key in shared)
        print(f"{run.name} at {length}: {off:.2f} of {run.topk} positions differ")
        assert off <= run.topk / 10
