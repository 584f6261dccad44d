"""What one engine step looks like to the indexer and to attention: which request and position each token is.

Both caches use the same builder. All tokens, of prefill and decode alike, take the sparse path; so vLLM is told that
every request is a decode and never looks for a dense prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


@dataclass
class SparseMetadata(AttentionMetadata):
    """One step: T tokens of R requests; tensors are views of buffers that keep their address between steps.

    ``request_of_token`` [T] int32 is the row of ``block_table`` [R, B] int32; ``lengths`` [T] int32 is how many
    positions of its request a token may see, itself included (0 for padding). ``spans`` lists (first token, end token,
    context length) of each request for host loops; None on a GPU, where the host must not wait for these numbers.
    """

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    request_of_token: torch.Tensor
    lengths: torch.Tensor
    spans: tuple[tuple[int, int, int], ...] | None
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    # Fields that vLLM's MLA layer asks every backend for.
    prefill: None = None
    decode: None = None


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """Builds :class:`SparseMetadata` in place, so that a CUDA graph that captured the buffers stays valid."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self._token = torch.arange(most, dtype=torch.int32, device=device)
        self._request = torch.zeros(most, dtype=torch.int32, device=device)
        self._length = torch.zeros(most, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata:
        common = common_attn_metadata
        tokens, requests = common.num_actual_tokens, common.num_reqs
        starts, seq_lens = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        token, request, length = self._token[:tokens], self._request[:tokens], self._length[:tokens]
        # Padding requests are empty, so the last real request's end is every later boundary too.
        found = torch.searchsorted(starts[1:], token, right=True).clamp_(max=requests - 1)
        request.copy_(found)
        left = starts[1:][found] - token  # tokens of the request from here on, itself included
        length.copy_(torch.where(left > 0, seq_lens[found] - left + 1, 0).clamp_(min=0))
        return SparseMetadata(
            num_reqs=requests,
            num_actual_tokens=tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=starts,
            seq_lens=seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            request_of_token=request,
            lengths=length,
            spans=_spans(starts, seq_lens) if self.device.type == "cpu" else None,
            num_decodes=requests,
            num_decode_tokens=tokens,
        )


def _spans(starts: torch.Tensor, seq_lens: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    bounds = starts.tolist()
    return tuple(zip(bounds[:-1], bounds[1:], seq_lens.tolist(), strict=True))
