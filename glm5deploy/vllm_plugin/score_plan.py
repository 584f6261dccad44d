"""How prefilling requests are cut into chunks whose scores fit a fixed amount of memory. Plain numbers, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SCORES = 1 << 26
"""fp32 scores held at a time: 256 MiB."""
MOST_ROWS = 2048
"""Query rows of a chunk; more would only grow the selection's scratch memory."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows ``first`` to ``last`` - 1 of the step, of the requests ``request`` to ``last_request`` - 1.

    ``keys`` is how many keys these requests have together, ``width`` the most positions a row may see. A chunk that
    sees no more than topk positions is not ``scored``. ``gather`` says that its keys are not gathered yet.
    """

    first: int
    last: int
    request: int
    last_request: int
    keys: int
    width: int
    scored: bool
    gather: bool


def rows_at_once(width: int) -> int:
    """Rows of up to ``width`` scores that are held at a time."""
    return max(1, min(MOST_ROWS, SCORES // max(1, width)))


def plan_chunks(
    starts: Sequence[int], contexts: Sequence[int], first_request: int, key_rows: int, topk: int
) -> list[Chunk]:
    """Chunks that cover the rows of the requests from ``first_request`` on, in order.

    ``starts`` [R + 1] are the requests' first rows, ``contexts`` [R] their context lengths (this step's rows included),
    ``key_rows`` how many gathered keys there is room for, at least the longest context. Short requests share a chunk;
    a long one is cut by rows, and a chunk is only as wide as its last row can see.
    """
    chunks: list[Chunk] = []
    request = first_request
    while request < len(contexts):
        last = request + 1
        width = keys = contexts[request]
        while last < len(contexts):
            wider = max(width, contexts[last])
            rows = starts[last + 1] - starts[request]
            if keys + contexts[last] > key_rows or rows > rows_at_once(wider):
                break
            width, keys, last = wider, keys + contexts[last], last + 1
        chunks += _by_rows(starts, request, last, keys, width, topk)
        request = last
    return chunks


def _by_rows(starts: Sequence[int], request: int, last_request: int, keys: int, width: int, topk: int) -> list[Chunk]:
    begin, end = starts[request], starts[last_request]
    if last_request - request > 1:
        scored = width > topk
        return [Chunk(begin, end, request, last_request, keys, width, scored, scored)] if end > begin else []
    chunks: list[Chunk] = []
    first, gathered = begin, False
    while first < end:
        last = min(end, first + rows_at_once(width))
        # Rows are consecutive positions, and the request's last row sees all of its context.
        seen = width - (end - last)
        scored = seen > topk
        chunks.append(Chunk(first, last, request, last_request, keys, seen, scored, scored and not gathered))
        first, gathered = last, gathered or scored
    return chunks
