"""One step's bookkeeping: which request and how many positions each token has, with padding as CUDA graphs add it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm5deploy.vllm_plugin.metadata import SparseMetadata, SparseMetadataBuilder

MOST = 32


def build(queries: list[int], contexts: list[int], tokens: int | None = None) -> SparseMetadata:
    """``tokens`` above the queries' sum are padding; a query of 0 is a padding request."""
    # The builder reads three settings; a full engine configuration would need a model.
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST),
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    builder = SparseMetadataBuilder(None, [], config, torch.device("cpu"))
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    count = int(starts[-1]) if tokens is None else tokens
    common = SimpleNamespace(
        num_reqs=len(queries),
        num_actual_tokens=count,
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        query_start_loc=starts,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=torch.arange(count),
        block_table_tensor=torch.zeros((len(queries), 4), dtype=torch.int32),
    )
    return builder.build(0, common)  # type: ignore[arg-type]


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


def test_spans_for_host_loops() -> None:
    assert build([2, 0, 3], [9, 0, 3]).spans == ((0, 2, 9), (2, 2, 0), (2, 5, 3))
