"""The lightning indexer: scores every earlier position for a token and leaves the best ones in a shared buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear, UnquantizedLinearMethod
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionBackend

from glm5deploy.kernels.layout import INDEX_KEY_BYTES
from glm5deploy.vllm_plugin import PACKED, cpu, engine_config, index_product, selection
from glm5deploy.vllm_plugin.metadata import IndexMetadataBuilder


class Glm5IndexerBackend(AttentionBackend):
    """Describes the key cache to vLLM; nothing attends over it."""

    @staticmethod
    def get_name() -> str:
        return "GLM5_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise RuntimeError("the indexer's key cache has no attention implementation")

    @staticmethod
    def get_builder_cls() -> type[IndexMetadataBuilder]:
        return IndexMetadataBuilder

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
        if not cpu.is_cpu():
            _reserve(vllm_config, config)
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
        self.own_product = (
            engine_config.reaches(engine_config.fusion(vllm_config), "experts")
            and not (cpu.is_cpu() or envs.VLLM_BATCH_INVARIANT or vllm_config.lora_config is not None)
            and type(self.wk_weights_proj.quant_method) is UnquantizedLinearMethod
        )
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6, dtype=torch.float32)
        self.k_cache = Glm5IndexerCache(
            head_dim=INDEX_KEY_BYTES, dtype=torch.uint8, prefix=f"{prefix}.k_cache", cache_config=cache_config
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        qr: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
        q: torch.Tensor | None = None,
        both: torch.Tensor | None = None,
    ) -> None:
        """hidden_states [T, hidden], qr [T, q rank], positions [T] -> topk_indices_buffer[:T], -1 padded.

        What has been computed: ``q`` [T, index heads * 128] is ``wq_b`` of ``qr``, and its tokens may lie apart;
        ``both`` [T, 128 + index heads] is ``wk_weights_proj`` of hidden_states.
        """
        q = (self.wq_b(qr)[0] if q is None else q).view(-1, self.n_head, self.head_dim)
        # vLLM's layer without quantisation is this product, too.
        if both is None and self.own_product:
            both = index_product.OP(hidden_states, self.wk_weights_proj.weight)
        elif both is None:
            both = self.wk_weights_proj(hidden_states)[0]
        key, weights = both.split([self.head_dim, self.n_head], dim=-1)
        norm_weight, norm_bias = self.k_norm.weight, self.k_norm.bias
        cos_sin = rotary_emb.cos_sin_cache
        if rotary_emb.is_neox_style:
            # The norm's parameters move along: it does not depend on the order of dimensions either.
            q, key = _adjacent_pairs(q, self.rope_dim), _adjacent_pairs(key, self.rope_dim)
            norm_weight, norm_bias = (_adjacent_pairs(part, self.rope_dim) for part in (norm_weight, norm_bias))
        selection.OP(
            q,
            key,
            weights,
            norm_weight,
            norm_bias,
            self.k_norm.eps,
            positions,
            cos_sin,
            self.factor,
            self.topk_indices_buffer,
            self.topk_tokens,
            _encode_layer_name(self.k_cache.prefix),
        )


def _adjacent_pairs(x: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder the first ``width`` dimensions so that half-split RoPE becomes interleaved RoPE.

    Scores of query and key do not depend on the order of their dimensions as long as both have the same.
    """
    first, second = x[..., :width].chunk(2, dim=-1)
    return torch.cat((torch.stack((first, second), dim=-1).flatten(-2), x[..., width:]), dim=-1)


def _reserve(vllm_config: Any, config: Any) -> None:
    """Make the GPU's scratch memory while the model is built, so that vLLM's memory profile counts it."""
    from glm5deploy.kernels.warmup import Serving
    from glm5deploy.vllm_plugin import device

    speculative = vllm_config.speculative_config
    fusion = engine_config.fusion(vllm_config)
    device.reserve(
        Serving(
            heads=config.num_attention_heads // vllm_config.parallel_config.tensor_parallel_size,
            index_heads=config.index_n_heads,
            topk=config.index_topk,
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_length=vllm_config.model_config.max_model_len,
            # Not the cache configuration's: vLLM settles that after the model is built.
            block_size=engine_config.BLOCK_SIZE,
            packed=vllm_config.cache_config.cache_dtype == PACKED,
            dtype=vllm_config.model_config.dtype,
            max_next_n=1 + (speculative.num_speculative_tokens if speculative else 0),
            query_rank=config.q_lora_rank if fusion != "off" else 0,
            query_nope=config.qk_nope_head_dim if engine_config.reaches(fusion, "query") else 0,
            width=config.hidden_size if engine_config.reaches(fusion, "norms") else 0,
            values=config.v_head_dim if engine_config.reaches(fusion, "experts") else 0,
            experts=config.n_routed_experts if engine_config.reaches(fusion, "experts") else 0,
            index_at_once=engine_config.reaches(fusion, "experts"),
        ),
        torch.device("cuda"),
    )
