"""Hyper-parameters of a ``glm-dsa`` model, read from GGUF metadata and checked before anything is built from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE, present_mtp_blocks, require_glm_dsa
from glm5deploy.glm_dsa.metadata import (
    Metadata,
    describe,
    is_array,
    read_flag,
    read_float32,
    read_size,
)

MOST_LAYERS = 4096
_GATING: dict[int, Literal["softmax", "sigmoid"]] = {0: "sigmoid", 1: "softmax", 2: "sigmoid"}


@dataclass(frozen=True, slots=True)
class Hparams:
    """One model's dimensions. ``num_layers`` counts hidden layers; the ``num_nextn`` MTP blocks come after them.

    ``indexer_types`` is the file's own schedule, one flag a hidden layer, true for a layer with an indexer of its own;
    None when the file does not say (see :mod:`glm5deploy.glm_dsa.indexer_schedule`).
    """

    num_layers: int
    num_nextn: int
    context_length: int
    vocab_size: int
    hidden_size: int
    dense_intermediate_size: int
    num_dense_layers: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_experts: int
    num_experts_used: int
    num_shared_experts: int
    num_expert_groups: int
    num_expert_groups_used: int
    moe_intermediate_size: int
    scoring_func: Literal["softmax", "sigmoid"]
    normalise_expert_weights: bool
    routed_scaling_factor: float
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[bool, ...] | None

    @property
    def num_blocks(self) -> int:
        """``blk.N`` blocks with tensors: hidden layers, then MTP blocks."""
        return self.num_layers + self.num_nextn

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Values of a cached latent row: compressed keys and values, then the shared RoPE part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size * self.num_shared_experts


def read_hparams(metadata: Metadata, tensor_names: Collection[str]) -> Hparams:
    """Read and check the hyper-parameters of the model whose whole tensor table has ``tensor_names``.

    The names tell MTP variants apart: a draft-only file lacks the hidden layers and is refused; a file whose MTP block
    was stripped keeps its key, so ``num_nextn`` becomes 0. Raises :class:`FileFormatError` naming the key at fault.
    """
    require_glm_dsa(metadata)
    p = ARCHITECTURE + "."
    num_blocks = read_size(metadata, p + "block_count", most=MOST_LAYERS)
    num_nextn = read_size(metadata, p + "nextn_predict_layers", default=0, least=0, most=num_blocks)
    num_layers = num_blocks - num_nextn
    if num_layers < 1:
        raise FileFormatError(f"{p}block_count {num_blocks} leaves no hidden layer beside {num_nextn} MTP blocks")
    num_nextn = present_mtp_blocks(num_layers, num_nextn, tensor_names)
    rope_dim = read_size(metadata, p + "rope.dimension_count", most=65536)
    qk_head_dim = read_size(metadata, p + "attention.key_length_mla", most=65536)
    gating = read_size(metadata, p + "expert_gating_func", default=2, least=0)
    if gating not in _GATING:
        raise FileFormatError(f"metadata key {p}expert_gating_func is {gating}; known are 1 (softmax) and 2 (sigmoid)")
    hparams = Hparams(
        num_layers=num_layers,
        num_nextn=num_nextn,
        context_length=read_size(metadata, p + "context_length"),
        vocab_size=_vocab_size(metadata, p + "vocab_size"),
        hidden_size=read_size(metadata, p + "embedding_length"),
        dense_intermediate_size=read_size(metadata, p + "feed_forward_length"),
        num_dense_layers=read_size(metadata, p + "leading_dense_block_count", least=0, most=num_layers),
        num_heads=read_size(metadata, p + "attention.head_count", most=65536),
        q_lora_rank=read_size(metadata, p + "attention.q_lora_rank"),
        kv_lora_rank=read_size(metadata, p + "attention.kv_lora_rank"),
        qk_nope_head_dim=qk_head_dim - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=read_size(metadata, p + "attention.value_length_mla", most=65536),
        rope_theta=read_float32(metadata, p + "rope.freq_base"),
        rms_norm_eps=read_float32(metadata, p + "attention.layer_norm_rms_epsilon"),
        num_experts=read_size(metadata, p + "expert_count", most=65536),
        num_experts_used=read_size(metadata, p + "expert_used_count", most=65536),
        num_shared_experts=read_size(metadata, p + "expert_shared_count", most=65536),
        num_expert_groups=read_size(metadata, p + "expert_group_count", default=1, most=65536),
        num_expert_groups_used=read_size(metadata, p + "expert_group_used_count", default=1, most=65536),
        moe_intermediate_size=_expert_width(metadata, p + "expert_feed_forward_length"),
        scoring_func=_GATING[gating],
        normalise_expert_weights=read_flag(metadata, p + "expert_weights_norm", default=False),
        routed_scaling_factor=read_float32(metadata, p + "expert_weights_scale", default=1.0),
        index_num_heads=read_size(metadata, p + "attention.indexer.head_count", most=65536),
        index_head_dim=read_size(metadata, p + "attention.indexer.key_length", most=65536),
        index_topk=read_size(metadata, p + "attention.indexer.top_k"),
        indexer_types=_indexer_types(metadata, p + "attention.indexer.types", num_layers),
    )
    _require_consistent(hparams, metadata)
    return hparams


def _vocab_size(metadata: Metadata, key: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    return read_size(metadata, key, default=len(tokens) if is_array(tokens) else None)


def _expert_width(metadata: Metadata, key: str) -> int:
    value = metadata.get(key)
    if not is_array(value):
        return read_size(metadata, key)
    # Newer converters may write a value per block, with 0 for the dense ones.
    widths = sorted({width for width in value if width != 0}, key=repr)
    if len(widths) != 1:
        raise FileFormatError(f"metadata key {key} holds different widths {widths[:4]}; vLLM builds one width only")
    return read_size({key: widths[0]}, key)


def _indexer_types(metadata: Metadata, key: str, num_layers: int) -> tuple[bool, ...] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not is_array(value) or any(flag not in (0, 1) for flag in value):
        raise FileFormatError(f"metadata key {key} must be an array of booleans, the file holds {describe(value)}")
    flags = tuple(bool(flag) for flag in value)
    if len(flags) != num_layers:
        raise FileFormatError(f"metadata key {key} has {len(flags)} entries for {num_layers} hidden layers")
    return flags


def _require_consistent(h: Hparams, metadata: Metadata) -> None:
    p = ARCHITECTURE + "."
    scaling = metadata.get(p + "rope.scaling.type")
    if scaling not in (None, "none"):
        raise FileFormatError(f"{p}rope.scaling.type is {describe(scaling)}; GLM-5 models have no RoPE scaling")
    if p + "rope.dimension_sections" in metadata:
        raise FileFormatError(f"{p}rope.dimension_sections is set; GLM-5 models have one RoPE section")
    rules = (
        (h.qk_nope_head_dim > 0, "attention.key_length_mla must exceed rope.dimension_count"),
        (h.qk_rope_head_dim % 2 == 0, "rope.dimension_count must be even"),
        (h.index_head_dim >= h.qk_rope_head_dim, "attention.indexer.key_length must hold rope.dimension_count"),
        (h.num_experts_used <= h.num_experts, "expert_used_count must not exceed expert_count"),
        (h.num_experts % h.num_expert_groups == 0, "expert_count must be a multiple of expert_group_count"),
        (h.num_expert_groups_used <= h.num_expert_groups, "expert_group_used_count must not exceed expert_group_count"),
        (
            read_size(metadata, p + "attention.key_length", default=h.latent_dim) == h.latent_dim,
            "attention.key_length must be attention.kv_lora_rank + rope.dimension_count",
        ),
        (
            read_size(metadata, p + "attention.value_length", default=h.kv_lora_rank) == h.kv_lora_rank,
            "attention.value_length must be attention.kv_lora_rank",
        ),
    )
    broken = [f"{p}{rule}" for holds, rule in rules if not holds]
    if broken:
        raise FileFormatError("inconsistent metadata: " + "; ".join(broken))
