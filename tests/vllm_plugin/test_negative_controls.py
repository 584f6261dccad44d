"""Three faults that leave a fluent model: each must fail the comparison that the right model passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.compare import logprob_limit, logprob_median
from tests.support.goldens import prompts, references
from tests.vllm_plugin.conftest import Recording, Run

pytestmark = pytest.mark.engine

DENSE = Run("A", change=(("index_topk", 2048),))
HALF_SPLIT_ROPE = Run("A", change=(("indexer_rope_interleave", False),))
WRONG_SCHEDULE = Run("B-Q4", schedule="FFFS")


@pytest.mark.parametrize("run", [DENSE, HALF_SPLIT_ROPE, WRONG_SCHEDULE], ids=["dense", "half-split", "schedule"])
def test_fault_fails_the_comparison(run: Run, recording: Callable[[Run], Recording]) -> None:
    answers = recording(run).answers
    for name in ("p300", "p700"):
        median = logprob_median(references(run.key)[name], answers[name].top)
        # Beyond what bf16 is allowed, so no tolerance in use would let it pass.
        assert median > logprob_limit("bfloat16", len(prompts()[name].ids)), f"{name}: {median:.3f} passes"


@pytest.mark.parametrize("run", [DENSE, HALF_SPLIT_ROPE, WRONG_SCHEDULE], ids=["dense", "half-split", "schedule"])
def test_fault_does_not_show_where_everything_is_selected(run: Run, recording: Callable[[Run], Recording]) -> None:
    """Up to 64 tokens nothing is left out: the control differs by its fault alone, not by a broken model."""
    answers = recording(run).answers
    for name in ("p5", "p63"):
        median = logprob_median(references(run.key)[name], answers[name].top)
        assert median <= logprob_limit("float32", len(prompts()[name].ids)), f"{name}: {median:.3f}"
