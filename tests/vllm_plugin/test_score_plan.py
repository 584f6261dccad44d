"""Chunks of prefilling rows: they cover every row once, fit the memory, and gather what they score."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5deploy.vllm_plugin.score_plan import MOST_ROWS, SCORES, Chunk, plan_chunks, rows_at_once

requests = st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 200_000)), min_size=1, max_size=12)


@given(requests, st.integers(0, 3), st.sampled_from([64, 2048]))
@settings(max_examples=200, deadline=None)
def test_every_row_is_covered_once_and_sees_enough(found: list[tuple[int, int]], decodes: int, topk: int) -> None:
    rows = [1] * decodes + [new for new, _ in found]
    contexts = [7] * decodes + [new + before for new, before in found]
    starts = [0, *accumulate(rows)]
    room = max(contexts)
    chunks = plan_chunks(starts, contexts, decodes, room, topk)
    assert chunks[0].first == decodes
    assert chunks[-1].last == starts[-1]
    assert all(before.last == after.first for before, after in pairwise(chunks))
    gathered: tuple[int, int] | None = None
    for chunk in chunks:
        assert (chunk.last - chunk.first) * chunk.width <= max(SCORES, chunk.width)
        assert chunk.last - chunk.first <= MOST_ROWS
        assert chunk.keys == sum(contexts[chunk.request : chunk.last_request]) <= room
        assert chunk.width == max(last_visible(chunk, starts, contexts))
        assert chunk.scored == (chunk.width > topk)
        if chunk.gather:
            gathered = (chunk.request, chunk.last_request)
        if chunk.scored:
            assert gathered == (chunk.request, chunk.last_request)


def last_visible(chunk: Chunk, starts: list[int], contexts: list[int]) -> list[int]:
    """How many positions the last of the chunk's rows of each request sees."""
    return [
        contexts[r] - (starts[r + 1] - min(chunk.last, starts[r + 1])) for r in range(chunk.request, chunk.last_request)
    ]


def test_short_prompts_share_a_chunk_and_a_long_one_is_cut_by_rows() -> None:
    chunks = plan_chunks([0, 10, 30, 8030], [10, 20, 131_072], 0, 131_072, 2048)
    assert chunks[0] == Chunk(0, 30, 0, 2, 30, 20, False, False)
    assert [c.last - c.first for c in chunks[1:]] == [512] * 15 + [320]
    assert [c.gather for c in chunks[1:]] == [True] + [False] * 15
    assert chunks[1].width == 131_072 - 8000 + 512
    assert chunks[-1].width == 131_072


@pytest.mark.parametrize(("width", "rows"), [(1, MOST_ROWS), (1 << 20, 64), (1 << 30, 1)])
def test_rows_at_once(width: int, rows: int) -> None:
    assert rows_at_once(width) == rows
