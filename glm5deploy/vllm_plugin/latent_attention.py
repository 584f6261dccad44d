"""vLLM's layer around latent attention with fewer launches.

Between its first product and attention vLLM launches a norm of the query's latents, a norm of the key's, RoPE of both,
the store into the cache, and the product with W_UK. The setting ``glm5_fusion`` of vLLM's additional configuration says
how much of it runs in kernels of this package: ``off`` nothing; ``latent`` both norms, the key's RoPE and the store, in
one launch; ``query`` also the query's RoPE and W_UK, in one more; ``norms`` the same here, and more in front of it;
``experts`` also, of few tokens, index keys and head weights beside the norms, queries and index queries in one product,
and behind attention the combination of its parts and W_UV, in one. Numbers are rounded where vLLM rounds them.

The CPU engine, and a vLLM whose code is not the one that is replaced here, run vLLM's own layer.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.utils.torch_utils import _encode_layer_name

from glm5deploy.kernels.layout import LATENT_DIM, ROPE_DIM
from glm5deploy.vllm_plugin import cpu, engine_config, latent_ops, replaced
from glm5deploy.vllm_plugin.attention import Glm5SparseImpl
from glm5deploy.vllm_plugin.linear_pair import LinearPair, pair_of
from glm5deploy.vllm_plugin.norms import Glm5Norm

logger = init_logger("vllm.glm5deploy")


class Glm5LatentAttention(MultiHeadLatentAttentionWrapper):
    """One layer's projections, indexer and attention; parameters and constructor are vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wanted = engine_config.fusion(get_current_vllm_config())
        self.fusion = "off" if cpu.is_cpu() else wanted
        obstacle = None if self.fusion == "off" else why_not(self)
        if obstacle:
            logger.warning_once("vLLM's own operations run before attention: %s", obstacle)
            self.fusion = "off"
        self.both_queries: LinearPair | None = None
        # Adapters put another layer in a projection's place, which is looked up again only where it is called.
        if engine_config.reaches(self.fusion, "experts") and get_current_vllm_config().lora_config is None:
            self.both_queries = both_queries(self)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """positions int [T], hidden_states [T, hidden] -> [T, hidden]; writes the latent cache and the selection."""
        if self.fusion == "off" or llama_4_scaling is not None:
            return super().forward(positions, hidden_states, llama_4_scaling)  # type: ignore[no-any-return]
        x = self.fused_qkv_a_proj(hidden_states)[0]
        cos_sin = self.rotary_emb._match_cos_sin_cache_dtype(x)
        layer = _encode_layer_name(self.mla_attn.layer_name)
        norm = self.q_a_layernorm
        norms = norm.weight, self.kv_a_layernorm.weight, norm.variance_epsilon
        beside = self.index_weight()
        q_latent, projected = latent_ops.latent_input(
            x, positions, cos_sin, *norms, layer, None if beside is None else hidden_states, beside
        )
        if self.both_queries is not None:
            q, index_q = self.both_queries(q_latent)
        else:
            q, index_q = self.q_b_proj(q_latent)[0], None
        q = q.view(-1, self.num_heads, self.qk_head_dim)  # whose tokens lie apart where index queries are between them
        if self.indexer and not self.skip_topk:
            done = index_q, None if beside is None else projected
            self.indexer(hidden_states, q_latent, positions, self.indexer_rope_emb, *done)
        self.mla_attn.impl.record_logical_topk_ready()
        out = q.new_empty((hidden_states.shape[0], self.num_heads * self.v_head_dim))
        if engine_config.reaches(self.fusion, "query"):
            values_at_once = engine_config.reaches(self.fusion, "experts")
            latent_ops.attention(q, positions, cos_sin, out, values_at_once, layer)
        else:
            rope = q[..., self.qk_nope_head_dim :]
            q[..., self.qk_nope_head_dim :], _ = self.rotary_emb(positions, rope)
            # The key is in the cache already: of what stands for it here, our backend reads nothing.
            key, key_rope = x[:, self.q_lora_rank :].split([LATENT_DIM, ROPE_DIM], dim=-1)
            torch.ops.vllm.unified_mla_attention_with_output(q, key, key_rope.unsqueeze(1), out, layer)
        return self.o_proj(out)[0]  # type: ignore[no-any-return]

    def index_weight(self) -> torch.Tensor | None:
        """What the launch behind the first product multiplies hidden states with, for the indexer; None for nothing."""
        if self.indexer is None or self.skip_topk or not engine_config.reaches(self.fusion, "experts"):
            return None
        return self.indexer.wk_weights_proj.weight if self.indexer.own_product else None


def both_queries(layer: Any) -> LinearPair | None:
    """The products that make queries and index queries of latents, where a layer selects and both can be one."""
    if layer.indexer is None or layer.skip_topk:
        return None
    return pair_of(layer.q_b_proj, layer.indexer.wq_b)


def why_not(layer: Any) -> str | None:
    """What keeps the kernels from standing in for vLLM's operations in a layer that it has built, or None."""
    unknown = replaced.obstacle()
    if unknown:
        return unknown
    rotary, norms = layer.rotary_emb, (layer.q_a_layernorm, layer.kv_a_layernorm)
    checks = {
        "attention runs on another backend": isinstance(layer.mla_attn.impl, Glm5SparseImpl),
        "the layer's projections are others": layer.q_lora_rank is not None
        and layer.g_proj is None
        and not layer.fuse_qkv_rmsnorm
        and not layer.dcp_q_replicate,
        f"latents are not {LATENT_DIM} wide": layer.kv_lora_rank == LATENT_DIM,
        "RoPE is of another kind": type(rotary) is RotaryEmbedding
        and (rotary.head_size, rotary.rotary_dim) == (ROPE_DIM, ROPE_DIM)
        and not (rotary.is_neox_style or rotary.use_flashinfer),
        "norms are of another kind": all(type(norm) is Glm5Norm and norm.has_weight for norm in norms)
        and all(norm.variance_size_override is None for norm in norms)
        and all(norm.weight.dtype == torch.get_default_dtype() for norm in norms)
        and norms[0].variance_epsilon == norms[1].variance_epsilon,
    }
    return replaced.first(checks)
