"""Hyper-parameters, schedule and tensor types of a model whose whole is what one rank of eight holds of GLM-5.

Heads, experts' width, the dense layers' width and the vocabulary are an eighth; what tensor parallelism replicates
(latents, indexer, router, norms) is whole. An engine of one rank then does one rank's work without collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from glm5deploy.demo.written_model import metadata_of, placements, required
from glm5deploy.glm_dsa.hparams import Hparams, read_hparams
from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern
from glm5deploy.glm_dsa.tensor_names import Placement

Scale = Literal["real", "small"]
Version = Literal["5", "5.2"]
Value = int | float | bool
RANKS = 8
LAYERS = 78

_COMMON: dict[str, Value] = {
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": 2,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "rope.dimension_count": 64,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
}
_REAL: dict[str, Value] = {
    "embedding_length": 6144,
    "feed_forward_length": 12288 // RANKS,
    "attention.head_count": 64 // RANKS,
    "expert_count": 256,
    "expert_used_count": 8,
    "leading_dense_block_count": 3,
    "vocab_size": 154880 // RANKS,
    "attention.q_lora_rank": 2048,
    "expert_feed_forward_length": 2048 // RANKS,
    "attention.indexer.top_k": 2048,
}
# For a try of the whole course on a small machine.
_SMALL: dict[str, Value] = {
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "expert_count": 16,
    "expert_used_count": 4,
    "leading_dense_block_count": 1,
    "vocab_size": 2048,
    "attention.q_lora_rank": 256,
    "expert_feed_forward_length": 256,
    "attention.indexer.top_k": 64,
}
# Attention and indexer as in the published GLM-5.2 files (their headers, of another mix), experts as 4-bit mixes have
# them; `down` of the routed experts alternates, see `type_of`. What is not named is F32.
_TYPES = {
    "token_embd": "Q4_K",
    "output": "Q6_K",
    "attn_q_a": "Q5_K",
    "attn_q_b": "Q8_0",
    "attn_kv_a_mqa": "Q8_0",
    "attn_k_b": "Q8_0",
    "attn_v_b": "Q8_0",
    "attn_output": "Q5_K",
    "indexer.attn_q_b": "Q8_0",
    "indexer.attn_k": "Q8_0",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_gate_shexp": "Q5_K",
    "ffn_up_shexp": "Q5_K",
    "ffn_down_shexp": "Q6_K",
}


@dataclass(frozen=True)
class Stack:
    """``layers`` of the model's 78, of a ``version`` with an indexer on every layer ("5") or on 21 ("5.2")."""

    layers: int = LAYERS
    scale: Scale = "real"
    version: Version = "5.2"

    @property
    def keys(self) -> dict[str, Value]:
        """Architecture keys without their prefix."""
        long_context = self.version == "5.2"
        return {
            "block_count": self.layers,
            "context_length": 1048576 if long_context else 202752,
            "rope.freq_base": 8000000.0 if long_context else 1000000.0,
            **_COMMON,
            **(_REAL if self.scale == "real" else _SMALL),
        }

    @property
    def schedule(self) -> tuple[bool, ...]:
        """Whether a layer has an indexer of its own."""
        return tuple(self.version == "5" or letter == "F" for letter in glm_5_2_pattern(self.layers))

    @cached_property
    def hparams(self) -> Hparams:
        return read_hparams(metadata_of(self.keys, self.schedule), {"blk.0.attn_norm.weight"})

    def placements(self) -> Iterator[Placement]:
        """Every tensor of the file, layer by layer, the output head last."""
        return placements([*required(self.hparams, self.schedule, use_mtp=False), "output.weight"], self.hparams)

    def type_of(self, placement: Placement) -> str:
        """GGML type of a tensor. Down projections of routed experts: Q6_K in the first and last eighth of the layers
        and in every third between, else Q4_K, as mixes of llama.cpp's quantiser have it."""
        stem = placement.kind.gguf.rsplit(".", 1)[0]
        if stem == "ffn_down_exps":
            layer = placement.layer or 0
            eighth = self.layers // 8
            more = layer < eighth or layer >= self.layers - eighth or (layer - eighth) % 3 == 2
            return "Q6_K" if more else "Q4_K"
        return _TYPES.get(stem, "F32")
