"""``config.json`` and ``generation_config.json``, rebuilt from GGUF metadata alone.

vLLM's defaults are wrong for GLM in four places and most of them fail without a word, so everything is written out:
``scoring_func`` (vLLM: softmax), ``topk_method`` (none), ``indexer_rope_interleave`` (false) and the schedule (all
layers full). The eos list is written because without it generation never stops.
"""

from __future__ import annotations

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.metadata import Metadata, read_float32, read_size

Json = dict[str, object]

# A turn ends with any of these: end of text, the user's turn (eot), a tool's answer (eom).
_EOS_KEYS = ("eos", "eot", "eom")
_SAMPLING = (
    ("general.sampling.temp", "temperature"),
    ("general.sampling.top_p", "top_p"),
    ("general.sampling.min_p", "min_p"),
    ("general.sampling.penalty_repeat", "repetition_penalty"),
)


def eos_token_ids(metadata: Metadata, vocab_size: int) -> list[int]:
    """Every token that ends a turn, end-of-text first; raises :class:`FileFormatError` when the file names none."""
    ids = [_token_id(metadata, f"tokenizer.ggml.{name}_token_id", vocab_size) for name in _EOS_KEYS]
    found = list(dict.fromkeys(token for token in ids if token is not None))
    if not found:
        raise FileFormatError(
            "the file names no end token (tokenizer.ggml.eos_token_id); generation would never stop",
            hint="Take a GGUF with a complete tokenizer.",
        )
    return found


def pad_token_id(metadata: Metadata, vocab_size: int) -> int:
    """The padding token, or the first end token when the file names none."""
    padding = _token_id(metadata, "tokenizer.ggml.padding_token_id", vocab_size)
    return eos_token_ids(metadata, vocab_size)[0] if padding is None else padding


def build_config(
    hparams: Hparams, schedule: IndexerSchedule, metadata: Metadata, *, tied_embeddings: bool = False
) -> Json:
    """The ``config.json`` of ``GlmMoeDsaForCausalLM``.

    ``tied_embeddings``: whether ``output.weight`` is in no shard (:attr:`TensorPlan.tied_embeddings`). The head counts
    of the file describe the compressed cache (1 KV head); Hugging Face's describe the full heads.
    """
    h = hparams
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": h.vocab_size,
        "hidden_size": h.hidden_size,
        "intermediate_size": h.dense_intermediate_size,
        "moe_intermediate_size": h.moe_intermediate_size,
        "num_hidden_layers": h.num_layers,
        "num_nextn_predict_layers": h.num_nextn,
        "num_attention_heads": h.num_heads,
        "num_key_value_heads": h.num_heads,
        "q_lora_rank": h.q_lora_rank,
        "kv_lora_rank": h.kv_lora_rank,
        "qk_nope_head_dim": h.qk_nope_head_dim,
        "qk_rope_head_dim": h.qk_rope_head_dim,
        "qk_head_dim": h.qk_head_dim,
        "v_head_dim": h.v_head_dim,
        "head_dim": h.qk_rope_head_dim,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": h.rms_norm_eps,
        "max_position_embeddings": h.context_length,
        "rope_parameters": {"rope_theta": h.rope_theta, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "index_n_heads": h.index_num_heads,
        "index_head_dim": h.index_head_dim,
        "index_topk": h.index_topk,
        "index_topk_pattern": schedule.pattern,
        "first_k_dense_replace": h.num_dense_layers,
        "moe_layer_freq": 1,
        "n_routed_experts": h.num_experts,
        "n_shared_experts": h.num_shared_experts,
        "num_experts_per_tok": h.num_experts_used,
        "n_group": h.num_expert_groups,
        "topk_group": h.num_expert_groups_used,
        "scoring_func": h.scoring_func,
        "topk_method": "noaux_tc",
        "norm_topk_prob": h.normalise_expert_weights,
        "routed_scaling_factor": h.routed_scaling_factor,
        "moe_router_dtype": "float32",
        "tie_word_embeddings": tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": list[object](eos_token_ids(metadata, h.vocab_size)),
        "pad_token_id": pad_token_id(metadata, h.vocab_size),
    }


def build_generation_config(metadata: Metadata, vocab_size: int) -> Json:
    """The ``generation_config.json``: end tokens, and the sampling settings that the file recommends."""
    config: Json = {
        "eos_token_id": list[object](eos_token_ids(metadata, vocab_size)),
        "pad_token_id": pad_token_id(metadata, vocab_size),
    }
    sampling: Json = {name: read_float32(metadata, key) for key, name in _SAMPLING if _is_on(metadata, key)}
    if _is_on(metadata, "general.sampling.top_k"):
        sampling["top_k"] = read_size(metadata, "general.sampling.top_k")
    if metadata.get("general.sampling.temp") == 0:
        return {"do_sample": False, "temperature": 0.0, **config}
    return {"do_sample": True, **sampling, **config} if sampling else config


def _is_on(metadata: Metadata, key: str) -> bool:
    """Present and not 0 or -1, which switch a sampler off."""
    return metadata.get(key) not in (None, 0, -1)


def _token_id(metadata: Metadata, key: str, vocab_size: int) -> int | None:
    if key not in metadata:
        return None
    return read_size(metadata, key, least=0, most=vocab_size - 1)
