"""Servers that keep their weights as the file has them, on the CPU engine: the same numbers as the references.

Products run in torch there. What differs from a GPU is the product alone: modules, reading, cuts and experts are those.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.compare import logprob_limit, logprob_median
from tests.support.engine import engine
from tests.support.goldens import PROMPTS, prompts, references
from tests.vllm_plugin.conftest import Run, record_prompts

pytestmark = pytest.mark.engine

QUANTISED = ("--model-loader-extra-config", json.dumps({"weights": "quantised"}))


@pytest.mark.parametrize(
    ("run", "flags"),
    [
        (Run("A"), ()),
        (Run("B-Q8", tp=2), ()),
        (Run("B-Q8", tp=2), ("--enable-expert-parallel",)),
    ],
    ids=["A", "B-Q8-tp2", "B-Q8-tp2-experts"],
)
def test_logprobs_match_the_reference(
    run: Run, flags: tuple[str, ...], model_folder: Callable[[Run], Path], tmp_path: Path
) -> None:
    with engine(model_folder(run), tmp_path, tp=run.tp, dtype=run.dtype, flags=(*QUANTISED, *flags)) as served:
        answers = record_prompts(served, run.tp).answers
        log = served.log.read_text()
    assert log.count("of quantised weights read in") == run.tp
    expected = references(run.key)
    medians = {name: logprob_median(expected[name], answers[name].top) for name in PROMPTS}
    assert all(medians[name] <= logprob_limit("float32", len(prompts()[name].ids)) for name in PROMPTS), medians
