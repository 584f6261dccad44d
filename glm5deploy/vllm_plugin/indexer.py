"""The lightning indexer: scores every earlier position for a token and leaves the best ones in a shared buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend

from glm5deploy.kernels.layout import INDEX_KEY_BYTES
from glm5deploy.kernels.reference import quantise_fp8
from glm5deploy.vllm_plugin import selection
from glm5deploy.vllm_plugin.metadata import SparseMetadataBuilder


class Glm5IndexerBackend(AttentionBackend):
    """Describes the key cache to vLLM; nothing attends over it."""

    @staticmethod
    def get_name() -> str:
        return "GLM5_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise RuntimeError("the indexer's key cache has no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [64]


class Glm5IndexerCache(DeepseekV32IndexerCache):
    """Index keys, 128 e4m3 values and one fp32 scale a token; layout in :mod:`glm5deploy.kernels.layout`."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        return Glm5IndexerBackend


class Glm5Indexer(nn.Module):
    """The indexer of one full layer; parameter names and constructor are those of vLLM's ``Indexer``."""

    def __init__(
        self,
        vllm_config: Any,
        config: Any,
        hidden_size: int,
        q_lora_rank: int,
        quant_config: Any,
        cache_config: Any,
        topk_indices_buffer: torch.Tensor | None,
        prefix: str = "",
        is_inplace_rope: bool = False,
    ) -> None:
        super().__init__()
        self.topk_tokens = config.index_topk
        self.n_head = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.topk_indices_buffer = topk_indices_buffer
        self.factor = self.head_dim**-0.5 * self.n_head**-0.5
        self.wq_b = ReplicatedLinear(
            q_lora_rank, self.head_dim * self.n_head, bias=False, quant_config=quant_config, prefix=f"{prefix}.wq_b"
        )
        self.wk_weights_proj = MergedColumnParallelLinear(
            hidden_size,
            [self.head_dim, self.n_head],
            bias=False,
            quant_config=None,
            disable_tp=True,
            prefix=f"{prefix}.wk_weights_proj",
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6, dtype=torch.float32)
        self.k_cache = Glm5IndexerCache(
            head_dim=INDEX_KEY_BYTES, dtype=torch.uint8, prefix=f"{prefix}.k_cache", cache_config=cache_config
        )

    def forward(self, hidden_states: torch.Tensor, qr: torch.Tensor, positions: torch.Tensor, rotary_emb: Any) -> None:
        """hidden_states [T, hidden], qr [T, q rank], positions [T] -> topk_indices_buffer[:T], -1 padded."""
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        key, weights = self.wk_weights_proj(hidden_states)[0].split([self.head_dim, self.n_head], dim=-1)
        key = self.k_norm(key)
        rest = self.head_dim - self.rope_dim
        q_rope, q_rest = q.split([self.rope_dim, rest], dim=-1)
        k_rope, k_rest = key.split([self.rope_dim, rest], dim=-1)
        q_rope, k_rope = rotary_emb(positions, q_rope, k_rope.unsqueeze(1))
        q = torch.cat((q_rope.reshape(-1, self.n_head, self.rope_dim), q_rest), dim=-1)
        key = torch.cat((k_rope.reshape(-1, self.rope_dim), k_rest), dim=-1)
        q_fp8, q_scale = quantise_fp8(q)
        folded = weights * q_scale * self.factor
        selection.OP(
            q_fp8, key, folded, self.topk_indices_buffer, self.topk_tokens, _encode_layer_name(self.k_cache.prefix)
        )
