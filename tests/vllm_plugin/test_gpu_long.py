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

from tests.support.compare import DECODE_MEDIAN, check_steps, logprob_differences
from tests.support.engine import Answer, Engine
from tests.support.gpu_servers import PACKED, GpuRun, LongAnswer, Result, ask_prompts, bf16, random_prompt
from tests.support.oracle import State, decoded_steps, oracle_of, step_differences
from tests.vllm_plugin.test_gpu import check_prompts

pytestmark = pytest.mark.gpu

LENGTHS = (2047, 2048, 2049, 4096, 8192, 32768, 131072)
STEPS = 8
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
def truth(topk: int) -> Truth:
    begun = time.monotonic()
    oracle, state = oracle_of("A", topk), State(watched=WATCHED)
    hidden = oracle.hidden(state, random_prompt(LENGTHS[-1], SEED))
    last = {n: oracle.logprobs(hidden[n - 1 : n], "output_norm") for n in LENGTHS}
    print(f"forward pass over {LENGTHS[-1]} tokens, top-k {topk}: {time.monotonic() - begun:.0f} s")
    return Truth(state, oracle.logprobs(hidden[:PROMPTED], "output_norm"), last)


LONG = ("--max-model-len", str(LENGTHS[-1] + 64))
NATIVE = ("--attention-backend", "FLASHMLA_SPARSE")
TASKS = (ask_prompts, ask_long)
TRUTH_128, TRUTH_2048 = partial(truth, 128), partial(truth, 2048)
RUNS = (
    GpuRun("A-topk128", bf16("A", index_topk=128), TASKS, "topk128/fp8", LONG, prepare=TRUTH_128),
    GpuRun("A-topk2048", bf16("A", index_topk=2048), TASKS, "dense", LONG, traced=False, prepare=TRUTH_2048),
    GpuRun(
        *("A-topk2048-fp8-cache", bf16("A", index_topk=2048), TASKS, "dense", (*LONG, *PACKED)),
        traced=False,
        prepare=TRUTH_2048,
    ),
    GpuRun(
        *("A-topk128-native", bf16("A", index_topk=128), TASKS, "topk128/fp8", (*LONG, *NATIVE)),
        native=True,
        traced=False,
        prepare=TRUTH_128,
    ),
)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)


def long_differences(topk: int, length: int, answer: Answer) -> list[list[float]]:
    known = truth(topk)
    later = oracle_of("A", topk).extend(known.state.fork(length), answer.ids[:-1])
    return step_differences(torch.cat((known.last[length], later)), decoded_steps(length, answer))


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
    answers = long_answers(gpu_results, run)
    found = {length: long_differences(run.topk, length, answer.cold) for length, answer in answers.items()}
    for length, steps in found.items():
        each = " ".join(f"{median(step):.2f}" for step in steps)
        print(f"{run.name} at {length}: median {median(d for step in steps for d in step):.3f}, steps {each}")
    print(run.name, check_steps([*found.values()], run.precision))


@every_run
def test_every_position_of_a_long_prompt_matches(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """8,192 positions in one step; positions below and above top-k are judged apart."""
    served = gpu_results[run.name].prompted
    assert served is not None, gpu_results[run.name].failure
    found = step_differences(truth(run.topk).prompted[:-1], [served.top[p] for p in range(PROMPTED - 1)])
    bounds = [0, 128, 2048, 4096, PROMPTED - 1]
    for first, last in pairwise(bounds):
        print(f"{run.name} positions {first} to {last}:", check_steps([found[first:last]], run.precision))


@every_run
def test_a_cached_prefix_gives_the_same_numbers(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    for length, answer in long_answers(gpu_results, run).items():
        assert answer.hits >= length - 128, f"{length}: {answer.hits} positions came from the cache"
        cold, warm = decoded_steps(length, answer.cold), decoded_steps(length, answer.warm)
        pairs = zip(answer.cold.ids, answer.warm.ids, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), STEPS - 1) + 1
        steps = [logprob_differences([*c.items()], w) for c, w in zip(cold[:same], warm[:same], strict=True)]
        off = median(d for step in steps for d in step)
        print(f"{run.name} at {length}: {answer.hits:.0f} cached, off by {off:.4f} over {same} steps")
        assert off <= DECODE_MEDIAN[run.run.dtype]


@pytest.mark.parametrize("run", [r for r in RUNS if r.traced], ids=lambda r: r.name)
def test_long_contexts_select_what_a_forward_pass_selects(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    expected = truth(run.topk).state.selected
    for length, answer in long_answers(gpu_results, run).items():
        shared = [key for key in answer.selections if key[1] < length]
        assert {position for _, position in shared} == {p for p in WATCHED if p < length}
        assert {layer for layer, _ in shared} == {0, 1, 2, 3}
        assert all(len(answer.selections[key]) == min(run.topk, key[1] + 1) for key in shared)
        off = mean(len(answer.selections[key] - expected[key]) for key in shared)
        print(f"{run.name} at {length}: {off:.2f} of {run.topk} positions differ")
        assert off <= run.topk / 10
