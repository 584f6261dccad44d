"""Every kind of tensor in a ``glm-dsa`` file: Hugging Face name, GGUF shape, role, and how tensor parallelism cuts it.

One table, read by naming, shape checks, tensor-parallel checks and memory accounting. Shapes are in GGUF order, the
contiguous dimension first. The converter permutes nothing: all kinds are renames but for the stacked experts and for
``kv_b_proj``, which is stored as a transposed key half and a value half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from glm5deploy.glm_dsa.hparams import Hparams

Role = Literal["embeddings", "norms", "attention", "indexer", "dense mlp", "router", "experts", "shared experts", "mtp"]
# "output": cut between rows (ne1), legal anywhere; "input": cut along a row (ne0), between blocks only;
# "heads": cut between heads; "experts": like its projection under TP, by whole experts under EP; "none": every rank.
Cut = Literal["output", "input", "heads", "expert output", "expert input", "none"]
Transform = Literal["rename", "k_b", "v_b", "experts", "gate_up_experts"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """``gguf`` and ``hf`` are names without their block prefix; ``hf`` of expert stacks has a ``{expert}`` field."""

    gguf: str
    hf: str
    role: Role
    cut: Cut
    shape: Callable[[Hparams], Shape]
    transform: Transform = "rename"


def _hidden(h: Hparams) -> Shape:
    return (h.hidden_size,)


def _vocabulary(h: Hparams) -> Shape:
    return (h.hidden_size, h.vocab_size)


GLOBAL = (
    TensorKind("token_embd.weight", "model.embed_tokens.weight", "embeddings", "output", _vocabulary),
    TensorKind("output_norm.weight", "model.norm.weight", "norms", "none", _hidden),
    TensorKind("output.weight", "lm_head.weight", "embeddings", "output", _vocabulary),
)

ATTENTION = (
    TensorKind("attn_norm.weight", "input_layernorm.weight", "norms", "none", _hidden),
    TensorKind("ffn_norm.weight", "post_attention_layernorm.weight", "norms", "none", _hidden),
    TensorKind(
        "attn_q_a.weight",
        "self_attn.q_a_proj.weight",
        "attention",
        "none",
        lambda h: (h.hidden_size, h.q_lora_rank),
    ),
    TensorKind("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight", "norms", "none", lambda h: (h.q_lora_rank,)),
    TensorKind(
        "attn_q_b.weight",
        "self_attn.q_b_proj.weight",
        "attention",
        "output",
        lambda h: (h.q_lora_rank, h.num_heads * h.qk_head_dim),
    ),
    TensorKind(
        "attn_kv_a_mqa.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "attention",
        "none",
        lambda h: (h.hidden_size, h.latent_dim),
    ),
    TensorKind(
        "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight", "norms", "none", lambda h: (h.kv_lora_rank,)
    ),
    TensorKind(
        "attn_output.weight",
        "self_attn.o_proj.weight",
        "attention",
        "input",
        lambda h: (h.num_heads * h.v_head_dim, h.hidden_size),
    ),
)

_KV_B = "self_attn.kv_b_proj.weight"
KV_B_SPLIT = (
    TensorKind(
        "attn_k_b.weight",
        _KV_B,
        "attention",
        "heads",
        lambda h: (h.qk_nope_head_dim, h.kv_lora_rank, h.num_heads),
        "k_b",
    ),
    TensorKind(
        "attn_v_b.weight", _KV_B, "attention", "heads", lambda h: (h.kv_lora_rank, h.v_head_dim, h.num_heads), "v_b"
    ),
)
KV_B_WHOLE = TensorKind(
    "attn_kv_b.weight",
    _KV_B,
    "attention",
    "output",
    lambda h: (h.kv_lora_rank, h.num_heads * (h.qk_nope_head_dim + h.v_head_dim)),
)

INDEXER = (
    TensorKind(
        "indexer.attn_q_b.weight",
        "self_attn.indexer.wq_b.weight",
        "indexer",
        "none",
        lambda h: (h.q_lora_rank, h.index_num_heads * h.index_head_dim),
    ),
    TensorKind(
        "indexer.attn_k.weight",
        "self_attn.indexer.wk.weight",
        "indexer",
        "none",
        lambda h: (h.hidden_size, h.index_head_dim),
    ),
    TensorKind(
        "indexer.k_norm.weight", "self_attn.indexer.k_norm.weight", "indexer", "none", lambda h: (h.index_head_dim,)
    ),
    TensorKind(
        "indexer.k_norm.bias", "self_attn.indexer.k_norm.bias", "indexer", "none", lambda h: (h.index_head_dim,)
    ),
    TensorKind(
        "indexer.proj.weight",
        "self_attn.indexer.weights_proj.weight",
        "indexer",
        "none",
        lambda h: (h.hidden_size, h.index_num_heads),
    ),
)


def _mlp(gguf: str, hf: str, role: Role, width: Callable[[Hparams], int]) -> tuple[TensorKind, ...]:
    """The gate, up and down projections of one gated MLP of ``width``."""

    def widen(h: Hparams) -> Shape:
        return (h.hidden_size, width(h))

    return (
        TensorKind(gguf.format("gate"), hf.format("gate"), role, "output", widen),
        TensorKind(gguf.format("up"), hf.format("up"), role, "output", widen),
        TensorKind(gguf.format("down"), hf.format("down"), role, "input", lambda h: (width(h), h.hidden_size)),
    )


DENSE_MLP = _mlp("ffn_{}.weight", "mlp.{}_proj.weight", "dense mlp", lambda h: h.dense_intermediate_size)
SHARED_EXPERTS = _mlp(
    "ffn_{}_shexp.weight",
    "mlp.shared_experts.{}_proj.weight",
    "shared experts",
    lambda h: h.shared_intermediate_size,
)
ROUTER = (
    TensorKind("ffn_gate_inp.weight", "mlp.gate.weight", "router", "none", lambda h: (h.hidden_size, h.num_experts)),
    TensorKind("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", "router", "none", lambda h: (h.num_experts,)),
)


def _experts(projection: str, cut: Cut, shape: Callable[[Hparams], Shape]) -> TensorKind:
    hf = f"mlp.experts.{{expert}}.{projection}_proj.weight"
    return TensorKind(f"ffn_{projection}_exps.weight", hf, "experts", cut, shape, "experts")


EXPERT_GATE_UP = (
    _experts("gate", "expert output", lambda h: (h.hidden_size, h.moe_intermediate_size, h.num_experts)),
    _experts("up", "expert output", lambda h: (h.hidden_size, h.moe_intermediate_size, h.num_experts)),
)
EXPERT_DOWN = _experts("down", "expert input", lambda h: (h.moe_intermediate_size, h.hidden_size, h.num_experts))
# Rows of the gate projection, then of the up projection, within each expert.
EXPERT_GATE_UP_FUSED = TensorKind(
    "ffn_gate_up_exps.weight",
    "mlp.experts.{expert}.gate_up_proj.weight",
    "experts",
    "expert output",
    lambda h: (h.hidden_size, 2 * h.moe_intermediate_size, h.num_experts),
    "gate_up_experts",
)

MTP = (
    TensorKind("nextn.eh_proj.weight", "eh_proj.weight", "mtp", "none", lambda h: (2 * h.hidden_size, h.hidden_size)),
    TensorKind("nextn.enorm.weight", "enorm.weight", "norms", "none", _hidden),
    TensorKind("nextn.hnorm.weight", "hnorm.weight", "norms", "none", _hidden),
    TensorKind("nextn.shared_head_norm.weight", "shared_head.norm.weight", "norms", "none", _hidden),
)
MTP_OPTIONAL = (
    TensorKind("nextn.embed_tokens.weight", "embed_tokens.weight", "mtp", "output", _vocabulary),
    TensorKind("nextn.shared_head_head.weight", "shared_head.head.weight", "mtp", "output", _vocabulary),
)

# Two ways to store the same weights: in parts, as llama.cpp's converter does, or whole, as others may.
ALTERNATIVES = ((KV_B_SPLIT, KV_B_WHOLE), (EXPERT_GATE_UP, EXPERT_GATE_UP_FUSED))

GLOBAL_BY_NAME = {kind.gguf: kind for kind in GLOBAL}
BLOCK_BY_NAME = {
    kind.gguf: kind
    for kind in (
        *ATTENTION,
        *KV_B_SPLIT,
        KV_B_WHOLE,
        *INDEXER,
        *DENSE_MLP,
        *SHARED_EXPERTS,
        *ROUTER,
        *EXPERT_GATE_UP,
        EXPERT_DOWN,
        EXPERT_GATE_UP_FUSED,
        *MTP,
        *MTP_OPTIONAL,
    )
}
