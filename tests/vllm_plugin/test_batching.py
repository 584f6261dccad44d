"""One server with a small token budget: prompts in chunks, requests side by side, prompts from the prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.compare import logprob_differences, logprob_limit, logprob_median
from tests.support.engine import Engine, engine
from tests.support.goldens import PROMPTS, prompts, references
from tests.vllm_plugin.conftest import Run

pytestmark = pytest.mark.engine

BUDGET = 192  # tokens a step, no multiple of the prompts' lengths
FLAGS = ("--max-num-batched-tokens", str(BUDGET), "--max-num-seqs", "8", "--enable-prefix-caching")
FLAGS += ("--quantization", "glm5_gguf")  # dense weights as well, through our quantisation method


@pytest.fixture(scope="module")
def served(model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(model_folder(Run("A", "merged")), tmp_path_factory.mktemp("engine"), flags=FLAGS) as running:
        yield running


def test_prompts_in_chunks_match_the_reference(served: Engine) -> None:
    served.clear_trace()
    answer = served.complete(prompts()["p700"].ids, tokens=1)
    assert logprob_median(references("A")["p700"], answer.top) <= logprob_limit("float32", 700)
    steps = [len(positions) for layer, positions in _steps(served) if layer == 0]
    assert sum(steps) == 700
    assert max(steps) <= BUDGET, "the prompt was not cut into chunks"


def test_requests_side_by_side_match_the_reference(served: Engine) -> None:
    served.clear_trace()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = dict(zip(PROMPTS, pool.map(lambda name: served.complete(prompts()[name].ids), PROMPTS), strict=True))
    for name, reference in references("A").items():
        median = logprob_median(reference, answers[name].top)
        assert median <= logprob_limit("float32", len(prompts()[name].ids)), f"{name}: {median:.4f}"
    assert any(np.unique(positions).size < positions.size for _, positions in _steps(served)), "nothing ran together"


def test_a_cached_prefix_gives_the_same_answer(served: Engine) -> None:
    prompt, reference = prompts()["p700"], references("A")["p700"]
    computed = []
    for _ in range(2):
        served.clear_trace()
        answer = served.complete(prompt.ids, tokens=1, prompt_logprobs=False)
        differences = logprob_differences(reference.top[699], answer.top[699])
        assert sorted(differences)[len(differences) // 2] <= logprob_limit("float32", 700)
        computed.append(sum(len(positions) for layer, positions in _steps(served) if layer == 0))
    assert computed[1] <= 64, f"{computed} positions were computed: the second prompt was not taken from the cache"


def _steps(served: Engine) -> list[tuple[int, np.ndarray]]:
    """Layer and positions of every indexer call since the trace was cleared."""
    steps = []
    for file in sorted(served.trace.glob("rank0-*.npz")):
        with np.load(file, allow_pickle=False) as record:
            steps.append((int(record["layer"]), record["position"]))
    return steps
