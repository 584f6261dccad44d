"""The configuration hook of the GLM-5 architecture: picks our model class and backend, sets what they need.

vLLM runs one hook per architecture while it validates a configuration. Ours acts when the weights are loaded by our
loader and no other backend was asked for, or when our backend was asked for by name; otherwise vLLM's own hook runs
alone and its native classes serve the model.
"""

from __future__ import annotations

import logging
from typing import Any

from glm5deploy.vllm_plugin import ARCHITECTURE, BACKEND, LOAD_FORMAT, PACKED, compat, cpu, registration

logger = logging.getLogger("vllm.glm5deploy")

MODEL_CLASS = "glm5deploy.vllm_plugin.model:Glm5ForCausalLM"
BLOCK_SIZE = 64  # tokens a cache block
FUSION = "glm5_fusion"  # of vLLM's additional configuration; see latent_attention.py, norms.py, metadata.py, experts.py
FUSIONS = ("off", "latent", "query", "norms", "experts")  # each includes those before it
DEFAULT_FUSION = "experts"
CHAINED = "glm5_chained"  # false: no launch begins before the one ahead of it has ended; see kernels/chain.py
# What every GLM-5 has, and vLLM takes to be something else where config.json is silent.
GLM = {"indexer_rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def uses_our_backend(vllm_config: Any) -> bool:
    """Whether attention runs on our backend: asked for by name, or left open and the weights come from our loader."""
    backend = vllm_config.attention_config.backend
    if backend is None:
        return bool(vllm_config.load_config.load_format == LOAD_FORMAT)
    return bool(backend.name == BACKEND)


def prepare(vllm_config: Any) -> None:
    """Point the architecture at our model class and refuse what the backend cannot do; ValueError says why."""
    parallel = vllm_config.parallel_config
    for size, what in (
        (parallel.decode_context_parallel_size, "decode context parallelism"),
        (parallel.prefill_context_parallel_size, "prefill context parallelism"),
    ):
        if size > 1:
            raise ValueError(
                f"{BACKEND} does not support {what}: a rank would select from its own shard of the context only. "
                "Use tensor parallelism, or name one of vLLM's backends with --attention-backend."
            )
    if not cpu.is_cpu():
        _refuse_types(vllm_config)
    fusion(vllm_config)
    chained(vllm_config)
    _warn_of_other_models(vllm_config.model_config.hf_config)
    # Not at glm5_latent_input: it returns a tensor, which a graph behind the cut would look for where it was captured.
    for operation in ("vllm::glm5_select", "vllm::glm5_attention"):
        compat.split_graphs_at(operation)
    vllm_config.attention_config.backend = registration.attention_backend()
    vllm_config.model_config.model_class_overrides[ARCHITECTURE] = MODEL_CLASS


def fusion(vllm_config: Any) -> str:
    """Which of vLLM's operations are fused, one of :data:`FUSIONS`; ValueError for another word."""
    settings = vllm_config.additional_config
    chosen = settings.get(FUSION, DEFAULT_FUSION) if isinstance(settings, dict) else DEFAULT_FUSION
    if chosen not in FUSIONS:
        raise ValueError(f"{FUSION} in --additional-config must be one of {', '.join(FUSIONS)}, not {chosen!r}")
    return str(chosen)


def chained(vllm_config: Any) -> bool:
    """Whether launches are chained, as they are unless the setting says false; ValueError for anything but a bool."""
    settings = vllm_config.additional_config
    chosen = settings.get(CHAINED, True) if isinstance(settings, dict) else True
    if not isinstance(chosen, bool):
        raise ValueError(f"{CHAINED} in --additional-config must be true or false, not {chosen!r}")
    return chosen


def reaches(chosen: str, level: str) -> bool:
    """Whether the setting ``chosen`` includes what ``level`` adds to the levels before it."""
    return FUSIONS.index(chosen) >= FUSIONS.index(level)


def _refuse_types(vllm_config: Any) -> None:
    """ValueError for types that the kernels cannot read; a cache that is not packed holds the model's own type."""
    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in ("bfloat16", "float16"):
        raise ValueError(f"{BACKEND} computes in bfloat16 or float16 on a GPU, not in {dtype}. Use --dtype bfloat16.")
    if cache_dtype not in ("auto", dtype, PACKED):
        raise ValueError(
            f"{BACKEND} keeps its cache in the model's type, {dtype}, or packed, not in {cache_dtype}. "
            f"Use --kv-cache-dtype auto, or {PACKED} for a smaller cache."
        )


def _warn_of_other_models(config: Any) -> None:
    found = {name: getattr(config, name, None) for name in GLM}
    wrong = [f"{name} is {found[name]!r} (GLM-5: {glm!r})" for name, glm in GLM.items() if found[name] != glm]
    if wrong:
        logger.warning(
            "config.json is not GLM-5's, answers may be wrong: %s. Write the model folder anew: glm5deploy patch.",
            ", ".join(wrong),
        )


def wrap(original: type) -> type:
    """A hook that prepares our engine before ``original`` runs; wrapping a wrapped hook gives it back."""
    if issubclass(original, Glm5Hook):
        return original
    return type("Glm5ConfigHook", (Glm5Hook, original), {"original": original})


class Glm5Hook:
    original: Any

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        if not uses_our_backend(vllm_config):
            cls.original.verify_and_update_config(vllm_config)
            return
        prepare(vllm_config)
        cpu.prepare(vllm_config)
        # vLLM's hook picks an fp8 cache on some GPUs, a layout of its own backends.
        cache_dtype = vllm_config.cache_config.cache_dtype
        cls.original.verify_and_update_config(vllm_config)
        vllm_config.cache_config.cache_dtype = cache_dtype
