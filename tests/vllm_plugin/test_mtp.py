"""Speculative decoding with the model's own MTP block: several tokens a request and step, the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.compare import SELECTED_MEAN, comparable_steps, logprob_limit, logprob_median
from tests.support.drafts import accepted_drafts, draft_selection
from tests.support.engine import engine
from tests.support.goldens import prompts, references
from tests.vllm_plugin.conftest import Run

pytestmark = pytest.mark.engine

DRAFTS = 2
MTP_LAYER = 4


def test_drafts_are_right_and_leave_the_answers_as_they_are(
    model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS}))
    with engine(model_folder(Run("A")), tmp_path_factory.mktemp("engine"), flags=flags) as served:
        for name in ("p65", "p300"):
            served.clear_trace()
            answer = served.complete(prompts()[name].ids, tokens=24)
            reference = references("A")[name]
            assert logprob_median(reference, answer.top) <= logprob_limit("float32", len(prompts()[name].ids))
            steps = comparable_steps(reference)
            assert answer.ids[:steps] == reference.greedy[:steps]
        rows = [np.load(file, allow_pickle=False) for file in sorted(served.trace.glob("rank0-*.npz"))]
        drafted = draft_selection("A", 64, "p300", answer, served.selections())
        accepted = accepted_drafts(served)
    layers = {int(record["layer"]) for record in rows}
    assert layers == {0, 1, 2, 3, MTP_LAYER}, "the draft model's indexer did not run"
    assert any(record["position"].size == 1 + DRAFTS for record in rows), "no step verified drafts"
    assert drafted <= SELECTED_MEAN, f"{drafted:.2f} positions of the draft layer are not the reference's"
    assert accepted["known drafts"] >= accepted["known prompts"], accepted
