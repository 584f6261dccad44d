"""The attention backend ``GLM5_TRITON_SPARSE``: each token attends to the latent rows its layer's indexer selected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import AttentionBackend, MLAAttentionImpl
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from glm5deploy.kernels.reference import slots_from_positions, sparse_mla
from glm5deploy.vllm_plugin import BACKEND, PACKED, cpu
from glm5deploy.vllm_plugin.metadata import SparseMetadata, SparseMetadataBuilder

if TYPE_CHECKING:
    from glm5deploy.kernels.slots import Lookup


class Glm5SparseBackend(AttentionBackend):
    """Sparse MLA over a latent cache of 576 values a token, on a CPU (torch) and on GPUs."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", PACKED]

    @staticmethod
    def get_name() -> str:
        return BACKEND

    @staticmethod
    def get_impl_cls() -> type[Glm5SparseImpl]:
        return Glm5SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        # Blocks of several layers may alternate in memory; whole rows between them keep one row index valid.
        return align_blocks_to_rows(spec)


class Glm5SparseImpl(MLAAttentionImpl[SparseMetadata], SharedTopkIndicesBuffer):
    """One layer's attention. A layer without an indexer reads the selection that an earlier layer left behind."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_args: Any,
    ) -> None:
        for value, what in ((alibi_slopes, "ALiBi"), (sliding_window, "a sliding window"), (logits_soft_cap, "a cap")):
            if value:
                raise ValueError(f"{BACKEND} does not support {what} on the attention scores")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = mla_args["kv_lora_rank"]
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)
        self._owns_selection = indexer is not None
        if kv_cache_dtype == PACKED and cpu.is_cpu():
            raise ValueError(f"the CPU engine has no {PACKED} cache; use --kv-cache-dtype auto")

    def record_logical_topk_ready(self) -> None:
        """Called by vLLM between indexer and attention; both run on one stream here."""

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q [T, H, 576] (or its latent and RoPE parts) over cache [blocks, block size, 576] -> out [T, H, 512]."""
        first = q[0] if isinstance(q, tuple) else q
        tokens, block_size = first.shape[0], kv_c_and_k_pe_cache.shape[1]
        if first.is_cuda:
            from glm5deploy.vllm_plugin import device

            resolved = self._resolved(tokens, kv_c_and_k_pe_cache, attn_metadata, fresh=self._owns_selection)
            return device.attend(q, *resolved, self.scale)
        selected = self.topk_indices_buffer
        assert selected is not None
        rows, block_stride = flat_kv_row_view(kv_c_and_k_pe_cache, block_size)
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        slots, _ = slots_from_positions(
            selected[:tokens],
            attn_metadata.request_of_token[:tokens],
            attn_metadata.block_table,
            block_size,
            block_stride,
        )
        out, lse = sparse_mla(query, rows, slots, self.scale)
        return out.to(query.dtype), lse

    def look_up(self, tokens: int, cache: torch.Tensor, metadata: SparseMetadata) -> Lookup | None:
        """What :meth:`forward_values` of as many tokens needs looked up in a launch before its own, if anything."""
        from glm5deploy.vllm_plugin import device

        selected, block_size = self.topk_indices_buffer, cache.shape[1]
        assert selected is not None
        _, block_stride = flat_kv_row_view(cache, block_size)
        return device.look_up(selected[:tokens], metadata, block_size, block_stride, fresh=self._owns_selection)

    def forward_values(
        self,
        q: tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """:meth:`forward_mqa` times W_UV, ``weight`` [H, 512, V], into ``out`` [T, H * V], by kernels alone.

        Behind a launch of what :meth:`look_up` gave.
        """
        from glm5deploy.vllm_plugin import device

        tokens, heads, _ = q[0].shape
        resolved = self._resolved(tokens, kv_c_and_k_pe_cache, attn_metadata, fresh=False)
        device.attend_values(q, *resolved, self.scale, weight, out.view(tokens, heads, -1))

    def _resolved(
        self, tokens: int, cache: torch.Tensor, metadata: SparseMetadata, *, fresh: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The cache as rows; which of them each token attends to, and how many these are, by kernels."""
        from glm5deploy.vllm_plugin import device

        selected, block_size = self.topk_indices_buffer, cache.shape[1]
        assert selected is not None
        rows, block_stride = flat_kv_row_view(cache, block_size)
        return rows, *device.resolve_slots(selected[:tokens], metadata, block_size, block_stride, fresh=fresh)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *newer: Any,
    ) -> None:
        """Write kv_c_normed [T, 512] and k_pe [T, 1, 64] at their slots; a negative slot (padding) writes nothing.

        ``newer`` takes what releases after 0.32 add to the call.
        """
        if kv_cache.numel() == 0:
            return
        if kv_cache.is_cuda:
            from glm5deploy.vllm_plugin import device

            device.store_latent(kv_c_normed, k_pe.flatten(1), slot_mapping.flatten(), kv_cache)
            return
        slots = slot_mapping.flatten()
        keep = slots >= 0
        slots = slots[keep].long()
        row = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[: keep.shape[0]][keep]
        kv_cache[slots // kv_cache.shape[1], slots % kv_cache.shape[1]] = row.to(kv_cache.dtype)
