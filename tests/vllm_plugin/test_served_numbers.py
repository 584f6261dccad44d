"""The served model's log-probabilities, selections and greedy tokens against the reference of every set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.compare import (
    DECODE_MEDIAN,
    SELECTED_MEAN,
    comparable_steps,
    logprob_limit,
    logprob_median,
    selected_difference,
)
from tests.support.goldens import PROMPTS, SETS, prompts, references
from tests.vllm_plugin.conftest import Recording, Run, decode_medians

# Layouts alternate over ranks; that both hold the same numbers is proven bit for bit in test_weights.py.
FP32 = (
    Run("A", "merged"),
    Run("A", "shards", tp=2, machines=2),
    Run("B-Q4", "shards"),
    Run("B-Q4", "merged", tp=2),
    Run("B-Q8"),
    Run("B-Q8", tp=2),
)
BF16 = (
    Run("A", "shards", dtype="bfloat16"),
    Run("B-Q4", "shards", tp=2, dtype="bfloat16"),
    Run("B-Q8", dtype="bfloat16"),
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("run", FP32 + BF16, ids=str)
def test_logprobs_match_the_reference(run: Run, recording: Callable[[Run], Recording]) -> None:
    answers = recording(run).answers
    medians = {name: logprob_median(references(run.key)[name], answers[name].top) for name in PROMPTS}
    off = {name: m for name, m in medians.items() if m > logprob_limit(run.dtype, len(prompts()[name].ids))}
    assert not off, f"medians over the limit: {off} of {medians}"


@pytest.mark.parametrize("run", FP32, ids=str)
def test_selections_match_the_reference_on_every_rank(run: Run, recording: Callable[[Run], Recording]) -> None:
    per_prompt = recording(run).selections
    for name, reference in references(run.key).items():
        if not reference.selected:
            continue
        for rank, selections in enumerate(per_prompt[name]):
            average = selected_difference(reference, selections)
            assert average <= SELECTED_MEAN, f"{name}, rank {rank}: {average:.2f} of 64 differ"


@pytest.mark.parametrize("run", FP32, ids=str)
def test_greedy_tokens_match_where_the_reference_is_sure(run: Run, recording: Callable[[Run], Recording]) -> None:
    answers = recording(run).answers
    for name, reference in references(run.key).items():
        steps = min(comparable_steps(reference), len(answers[name].ids))
        assert answers[name].ids[:steps] == reference.greedy[:steps], name


@pytest.mark.parametrize("run", FP32 + BF16, ids=str)
def test_decode_steps_give_what_a_prompt_gives(run: Run, recording: Callable[[Run], Recording]) -> None:
    medians = decode_medians(recording(run))
    assert all(median <= DECODE_MEDIAN[run.dtype] for median in medians.values()), medians


@pytest.mark.parametrize("run", FP32 + BF16, ids=str)
def test_only_full_layers_ran_an_indexer_and_rows_were_left_out(
    run: Run, recording: Callable[[Run], Recording]
) -> None:
    counts = recording(run).counts
    full = [layer for layer, letter in enumerate(SETS[run.key].schedule) if letter == "F"]
    assert sorted(counts) == [f"indexer-rank{rank}.json" for rank in range(run.tp)]
    for count in counts.values():
        assert count["layers"] == full
        assert 0 < count["sparse_rows"] < count["rows"]
