"""What one engine step looks like to the indexer and to attention: which request and position each token is.

Both caches use the same builder. All tokens, of prefill and decode alike, take the sparse path; so vLLM is told that
every request is a decode and never looks for a dense prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from glm5deploy.vllm_plugin import engine_config
from glm5deploy.vllm_plugin.score_plan import Chunk, plan_chunks


@dataclass(frozen=True)
class PlannedChunk:
    """A chunk of prefilling rows with its device numbers.

    ``cumulative`` int32 [requests + 1]: first gathered key of each request; ``starts`` and ``ends`` int32 [rows]: the
    gathered keys that a row may see.
    """

    chunk: Chunk
    cumulative: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor


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
    # What the indexer scores on a GPU: rows of decoding requests over the paged cache, the rest in chunks.
    scored_decodes: int = 0
    scored_rows: int = 0
    chunks: tuple[PlannedChunk, ...] = ()
    # Fields that vLLM's MLA layer asks every backend for.
    prefill: None = None
    decode: None = None
    # The same object for all that is built for one step and one table of blocks; steps of a draft model may share it.
    step: object = field(default_factory=object, compare=False, repr=False)

    def rows_selected(self, topk: int) -> int:
        """How many tokens, from the first on, a GPU's selection writes all ``topk`` positions of: padding has none."""
        if self.max_seq_len <= topk:
            return self.num_actual_tokens
        return self.chunks[-1].chunk.last if self.chunks else self.scored_rows


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """Builds :class:`SparseMetadata` in place, so that a CUDA graph that captured the buffers stays valid."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        fusion = engine_config.fusion(vllm_config)
        self._at_once = device.type != "cpu" and engine_config.reaches(fusion, "norms")
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
        if self._at_once:
            from glm5deploy.kernels.step_tokens import step_tokens

            step_tokens(starts, seq_lens, request, length)
        else:
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
            step=common,
        )


class IndexMetadataBuilder(SparseMetadataBuilder):
    """Adds what the indexer's launches on a GPU depend on."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._key_rows = vllm_config.model_config.max_model_len
        self._topk = vllm_config.model_config.hf_text_config.index_topk

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.device.type == "cpu":
            return metadata
        common = common_attn_metadata
        decodes, prefills, rows, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold or 1, require_uniform=True
        )
        metadata.scored_decodes, metadata.scored_rows = decodes, rows
        if prefills:
            starts, contexts = common.query_start_loc_cpu.tolist(), common.seq_lens_cpu_upper_bound.tolist()
            contexts = contexts[: common.num_reqs]
            metadata.chunks = plan_scores(metadata, starts, contexts, decodes, self._key_rows, self._topk)
        return metadata


def plan_scores(
    metadata: SparseMetadata, starts: list[int], contexts: list[int], first_request: int, key_rows: int, topk: int
) -> tuple[PlannedChunk, ...]:
    """:func:`~glm5deploy.vllm_plugin.score_plan.plan_chunks` with the device numbers of each chunk."""
    planned = []
    for chunk in plan_chunks(starts, contexts, first_request, key_rows, topk):
        rows = slice(chunk.first, chunk.last)
        lengths = metadata.seq_lens[chunk.request : chunk.last_request]
        cumulative = torch.zeros(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(lengths, dim=0, dtype=torch.int32, out=cumulative[1:])
        first = cumulative[metadata.request_of_token[rows] - chunk.request]
        planned.append(PlannedChunk(chunk, cumulative, first, first + metadata.lengths[rows]))
    return tuple(planned)


def _spans(starts: torch.Tensor, seq_lens: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    bounds = starts.tolist()
    return tuple(zip(bounds[:-1], bounds[1:], seq_lens.tolist(), strict=True))
