"""A step's tokens: requests and positions seen, against counting by hand."""

from __future__ import annotations

import random

import pytest
import torch

from glm5deploy.kernels.step_tokens import step_tokens


def found(queries: list[int], contexts: list[int], tokens: int) -> tuple[list[int], list[int]]:
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    buffers = torch.full((2, tokens + 5), -77, dtype=torch.int32)
    request, length = buffers[0, :tokens], buffers[1, :tokens]
    step_tokens(starts, torch.tensor(contexts, dtype=torch.int32), request, length)
    assert bool((buffers[:, tokens:] == -77).all()), "something was written behind the tokens"
    return request.tolist(), length.tolist()


def by_hand(queries: list[int], contexts: list[int], tokens: int) -> tuple[list[int], list[int]]:
    pairs = [(r, contexts[r] - n + 1 + i) for r, n in enumerate(queries) for i in range(n)]
    pairs += [(len(queries) - 1, 0)] * (tokens - len(pairs))
    return [r for r, _ in pairs], [length for _, length in pairs]


@pytest.mark.parametrize(
    ("queries", "contexts", "tokens"),
    [
        ([3], [3], 3),
        ([1, 1], [7, 100], 2),
        ([2, 3, 1], [2, 10, 5], 6),
        ([1, 1, 0, 0], [7, 9, 0, 0], 4),
        ([2, 2], [5, 6], 6),
        ([0, 4, 0, 1], [0, 4, 0, 9], 5),
        ([1] * 70, list(range(1, 71)), 70),
        ([300, 1, 90], [300, 5, 1000], 391),
    ],
)
def test_requests_and_lengths(queries: list[int], contexts: list[int], tokens: int) -> None:
    assert found(queries, contexts, tokens) == by_hand(queries, contexts, tokens)


def test_random_steps() -> None:
    random.seed(5)
    for _ in range(20):
        queries = [random.choice((1, 1, 2, random.randint(1, 60))) for _ in range(random.randint(1, 40))]
        queries += [0] * random.randint(0, 30)
        contexts = [n + random.randint(0, 500) if n else 0 for n in queries]
        tokens = sum(queries) + random.randint(0, 9)
        assert found(queries, contexts, tokens) == by_hand(queries, contexts, tokens)


def test_what_does_not_fit_is_refused() -> None:
    one, two = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for wrong, words in (
        ((one, one, two, two), "starts must be"),
        ((one, one[:0], two, two), "of a request or more"),
        ((two, one, two, one), "both outputs"),
        ((two, one, two, two.long()), "int32"),
    ):
        with pytest.raises(ValueError, match=words):
            step_tokens(*wrong)
