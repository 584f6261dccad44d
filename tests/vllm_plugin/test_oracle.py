"""The forward pass that servers are compared with, against the reference results of another implementation."""

from __future__ import annotations

import pytest
import torch

from tests.support.compare import logprob_median, selected_difference
from tests.support.goldens import SETS, prompts, references
from tests.support.oracle import Oracle, State, oracle_of

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
