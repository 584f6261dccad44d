"""The forward pass that servers are compared with, against the reference results of another implementation."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.support.compare import check_steps, logprob_median, selected_difference
from tests.support.engine import Answer
from tests.support.goldens import SETS, prompts, references
from tests.support.oracle import Oracle, State, answer_differences, oracle_of

EXACT = 2e-3  # both are fp32 and round in other places
CASES = [("A", "topk64/fp8", 64), ("A", "dense", 2048), ("B-Q4", "topk64/fp8", 64)]


@pytest.mark.parametrize(("key", "run", "topk"), CASES)
def test_the_references_come_out(key: str, run: str, topk: int) -> None:
    oracle = Oracle(SETS[key].path, SETS[key].schedule, topk=topk)
    for name, reference in references(key, run).items():
        prompt = prompts()[name]
        state = State(watched=frozenset(prompt.selected_positions))
        found = oracle.extend(state, prompt.ids + reference.greedy)
        top = {position: dict(enumerate(found[position].tolist())) for position in reference.top}
        assert logprob_median(reference, top) <= EXACT, name
        choices = found[len(prompt.ids) - 1 : -1].argmax(dim=-1).tolist()
        sure = [i for i, margin in enumerate(reference.margins) if margin > 0.01]
        assert [choices[i] for i in sure] == [reference.greedy[i] for i in sure], name
        if reference.selected:
            assert selected_difference(reference, state.selected) <= 0.1, name


def test_a_context_may_come_in_pieces_and_be_continued_twice() -> None:
    oracle, ids = oracle_of("A", 64), prompts()["p700"].ids
    whole, pieces = State(), State()
    expected = oracle.extend(whole, ids[:400])
    found = torch.cat([oracle.extend(pieces, part) for part in (ids[:1], ids[1:130], ids[130:399], ids[399:400])])
    assert (found - expected).abs().median() <= 1e-5
    fork = whole.fork(300)
    assert (oracle.extend(fork, ids[300:400]) - expected[300:]).abs().median() <= 1e-5
    assert whole.length == fork.length == 400


def answer_of(oracle: Oracle, ids: list[int], tokens: list[int]) -> Answer:
    """What a server would answer that computes as ``oracle`` does and decodes ``tokens``."""
    rows = oracle.extend(State(), [*ids, *tokens[:-1]], last=len(tokens))
    best = rows.topk(20)
    tops = [dict(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return Answer({len(ids) - 1 + i: top for i, top in enumerate(tops)}, tokens, [])


@pytest.mark.parametrize(
    ("key", "schedule", "topk", "right"),
    [("A", "FFFF", 64, True), ("A", "FFFF", 2048, False), ("B-Q4", "FFFF", 64, False)],
    ids=["right", "dense", "wrong schedule"],
)
def test_answers_of_another_computation_are_refused(key: str, schedule: str, topk: int, right: bool) -> None:
    """With the tolerance of bf16, in which the servers on a GPU compute."""
    truth, served = oracle_of(key, 64), Oracle(SETS[key].path, schedule, topk=topk)
    requests = []
    for name in ("p300", "p700"):
        ids, tokens = prompts()[name].ids, references(key)[name].greedy
        requests.append(answer_differences(truth, ids, answer_of(served, ids, tokens)))
    with nullcontext() if right else pytest.raises(AssertionError, match="steps: median"):
        check_steps(requests, "bfloat16")
