"""One step's bookkeeping: which request and how many positions each token has, with padding as CUDA graphs add it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm5deploy.vllm_plugin.metadata import IndexMetadataBuilder, SparseMetadata, SparseMetadataBuilder

MOST = 96
TOPK, KEY_ROWS = 8, 200


def settings(draft_tokens: int = 0) -> Any:
    """What the builders read; a full engine configuration would need a model."""
    return SimpleNamespace(
        additional_config={},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST),
        speculative_config=SimpleNamespace(num_speculative_tokens=draft_tokens, parallel_drafting=False)
        if draft_tokens
        else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        model_config=SimpleNamespace(max_model_len=KEY_ROWS, hf_text_config=SimpleNamespace(index_topk=TOPK)),
    )


def batch(queries: list[int], contexts: list[int], tokens: int | None = None) -> Any:
    """``tokens`` above the queries' sum are padding; a query of 0 is a padding request."""
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    count = int(starts[-1]) if tokens is None else tokens
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=len(queries),
        num_actual_tokens=count,
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        slot_mapping=torch.arange(count),
        block_table_tensor=torch.zeros((len(queries), 4), dtype=torch.int32),
    )


def build(queries: list[int], contexts: list[int], tokens: int | None = None) -> SparseMetadata:
    builder = SparseMetadataBuilder(None, [], settings(), torch.device("cpu"))
    return builder.build(0, batch(queries, contexts, tokens))


def build_for_gpu(
    queries: list[int], contexts: list[int], tokens: int | None = None, draft_tokens: int = 0
) -> SparseMetadata:
    """The GPU's metadata, computed here: the builder takes its buffers to be a GPU's."""
    builder = IndexMetadataBuilder(None, [], settings(draft_tokens), torch.device("cpu"))
    builder.device = torch.device("cuda")
    return builder.build(0, batch(queries, contexts, tokens))


@pytest.mark.parametrize(
    ("queries", "contexts", "tokens", "requests", "lengths"),
    [
        ([3], [3], None, [0, 0, 0], [1, 2, 3]),
        ([1, 1], [7, 100], None, [0, 1], [7, 100]),
        ([2, 3, 1], [2, 10, 5], None, [0, 0, 1, 1, 1, 2], [1, 2, 8, 9, 10, 5]),
        ([1, 1, 0, 0], [7, 9, 0, 0], 4, [0, 1], [7, 9, 0, 0]),
        ([2, 2], [5, 6], 6, [0, 0, 1, 1], [4, 5, 5, 6, 0, 0]),
    ],
    ids=["prompt", "decode", "chunks and decode", "padding requests", "padding tokens"],
)
def test_requests_and_lengths(
    queries: list[int], contexts: list[int], tokens: int | None, requests: list[int], lengths: list[int]
) -> None:
    metadata = build(queries, contexts, tokens)
    assert metadata.request_of_token.tolist()[: len(requests)] == requests
    assert metadata.lengths.tolist() == lengths
    assert int(metadata.request_of_token.max()) < len(queries), "padding must stay inside the block table"
    assert (metadata.num_decode_tokens, metadata.num_prefills) == (len(lengths), 0)


def test_a_step_is_known_by_all_that_is_built_for_it() -> None:
    """vLLM makes metadata for layers with an indexer and others for those without, from one description of a step."""
    builders = [
        kind(None, [], settings(), torch.device("cpu")) for kind in (SparseMetadataBuilder, IndexMetadataBuilder)
    ]
    first, second = batch([1, 1], [7, 9]), batch([1, 1], [7, 9])
    built = [builder.build(0, common) for common in (first, second) for builder in builders]
    assert built[0].step is built[1].step
    assert built[2].step is built[3].step
    assert built[1].step is not built[2].step


@pytest.mark.parametrize(
    ("queries", "contexts", "tokens", "written"),
    [
        ([1, 1, 0, 0], [100, 7, 0, 0], 4, 4),
        ([1, 1, 70], [100, 7, 90], 80, 72),
        ([1, 5, 4], [1, 5, 8], 12, 12),
    ],
    ids=["decode, padded", "chunks, padded", "no context exceeds the selection"],
)
def test_rows_that_a_selection_writes(queries: list[int], contexts: list[int], tokens: int, written: int) -> None:
    metadata = build_for_gpu(queries, contexts, tokens)
    assert metadata.rows_selected(TOPK) == written


@pytest.mark.parametrize(
    ("level", "device", "at_once"), [("norms", "meta", True), ("query", "meta", False), ("norms", "cpu", False)]
)
def test_where_a_gpu_does_it_at_once(level: str, device: str, at_once: bool) -> None:
    asked = settings()
    asked.additional_config = {"glm5_fusion": level}
    assert SparseMetadataBuilder(None, [], asked, torch.device(device))._at_once == at_once


def test_spans_for_host_loops() -> None:
    assert build([2, 0, 3], [9, 0, 3]).spans == ((0, 2, 9), (2, 2, 0), (2, 5, 3))


@pytest.mark.parametrize(
    ("queries", "contexts", "tokens", "draft_tokens", "decodes", "rows"),
    [
        ([1, 1, 1], [100, 7, 30], None, 0, 3, 3),
        ([1, 1, 0, 0], [100, 7, 0, 0], 4, 0, 4, 4),
        ([3, 3, 3], [100, 7, 30], None, 2, 3, 9),
        ([3, 3, 0], [100, 7, 0], 9, 2, 3, 9),
        ([2, 2], [100, 7], None, 2, 2, 4),
    ],
    ids=["one token each", "padded", "drafts", "drafts, padded", "fewer drafts"],
)
def test_decoding_requests_are_scored_over_the_paged_cache(
    queries: list[int], contexts: list[int], tokens: int | None, draft_tokens: int, decodes: int, rows: int
) -> None:
    metadata = build_for_gpu(queries, contexts, tokens, draft_tokens)
    assert (metadata.scored_decodes, metadata.scored_rows, metadata.chunks) == (decodes, rows, ())
    assert metadata.spans is None
    # Row by row as the kernel counts them: each belongs to the request of its place, or is padding.
    each = rows // decodes
    for row in range(rows):
        assert int(metadata.lengths[row]) == 0 or int(metadata.request_of_token[row]) == row // each


@pytest.mark.parametrize(
    ("queries", "contexts", "draft_tokens", "decodes", "rows", "chunks"),
    [
        ([1, 1, 5, 3], [100, 7, 60, 3], 0, 2, 2, [(2, 10, 2, 4)]),
        ([5, 3], [5, 60], 0, 0, 0, [(0, 8, 0, 2)]),
        ([4, 9, 7], [150, 120, 40], 0, 0, 0, [(0, 4, 0, 1), (4, 20, 1, 3)]),
        ([3, 3, 2, 6], [100, 7, 30, 60], 2, 2, 6, [(6, 14, 2, 4)]),
        ([7], [7], 0, 0, 0, [(0, 7, 0, 1)]),
    ],
    ids=["mixed", "prompts", "more keys than fit at once", "drafts of two lengths", "short prompt"],
)
def test_other_requests_are_scored_in_chunks_of_gathered_keys(
    queries: list[int],
    contexts: list[int],
    draft_tokens: int,
    decodes: int,
    rows: int,
    chunks: list[tuple[int, int, int, int]],
) -> None:
    metadata = build_for_gpu(queries, contexts, draft_tokens=draft_tokens)
    assert (metadata.scored_decodes, metadata.scored_rows) == (decodes, rows)
    found = [(p.chunk.first, p.chunk.last, p.chunk.request, p.chunk.last_request) for p in metadata.chunks]
    assert found == chunks
    for planned in metadata.chunks:
        chunk = planned.chunk
        before = [0]
        for context in contexts[chunk.request : chunk.last_request]:
            before.append(before[-1] + context)
        assert planned.cumulative.tolist() == before
        assert (chunk.keys, chunk.scored) == (before[-1], max(contexts[chunk.request : chunk.last_request]) > TOPK)
        for row in range(chunk.first, chunk.last):
            first = before[int(metadata.request_of_token[row]) - chunk.request]
            seen = int(metadata.lengths[row])
            place = row - chunk.first
            assert (int(planned.starts[place]), int(planned.ends[place])) == (first, first + seen)
            assert 0 < seen <= chunk.width
