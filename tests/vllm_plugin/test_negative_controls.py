"""Three faults that leave a fluent model: each must fail the comparison that the right model passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.compare import logprob_limit, logprob_median
from tests.support.engine import engine
from tests.support.goldens import prompts, references
from tests.vllm_plugin.conftest import STEPS, Run

pytestmark = pytest.mark.engine

DENSE = Run("A", change=(("index_topk", 2048),))
HALF_SPLIT_ROPE = Run("A", change=(("indexer_rope_interleave", False),))
WRONG_SCHEDULE = Run("B-Q4", schedule="FFFS")

Medians = dict[str, float]


@pytest.fixture(
    scope="module", params=[DENSE, HALF_SPLIT_ROPE, WRONG_SCHEDULE], ids=["dense", "half-split", "schedule"]
)
def medians(
    request: pytest.FixtureRequest, model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory
) -> Medians:
    run: Run = request.param
    with engine(model_folder(run), tmp_path_factory.mktemp("engine"), variables={"GLM5DEPLOY_TRACE_DIR": ""}) as served:
        answers = {name: served.complete(prompts()[name].ids, tokens=STEPS) for name in ("p5", "p63", "p300", "p700")}
    return {name: logprob_median(references(run.key)[name], answer.top) for name, answer in answers.items()}


def test_fault_fails_the_comparison(medians: Medians) -> None:
    for name in ("p300", "p700"):
        # Beyond what bf16 is allowed, so no tolerance in use would let it pass.
        assert medians[name] > logprob_limit("bfloat16", len(prompts()[name].ids)), f"{name} passes: {medians}"


def test_fault_does_not_show_where_everything_is_selected(medians: Medians) -> None:
    """Up to 64 tokens nothing is left out: the control differs by its fault alone, not by a broken model."""
    for name in ("p5", "p63"):
        assert medians[name] <= logprob_limit("float32", len(prompts()[name].ids)), medians
