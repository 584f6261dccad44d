"""The functions of vLLM that ours stand in for, known by their source: where that is another, vLLM's own run.

:mod:`glm5deploy.vllm_plugin.compat` says which names must exist; here it is their code that matters.
"""

from __future__ import annotations

import hashlib
import inspect
from functools import lru_cache

from glm5deploy.vllm_plugin import compat

_MLA = "vllm.model_executor.layers.mla"
_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"

# module, attribute path: the first digits of the source's SHA-256 in vLLM 0.32.0 and, where it differs, 0.33.0.
KNOWN: dict[tuple[str, str], tuple[str, ...]] = {
    (_MLA, "MultiHeadLatentAttentionWrapper.forward"): ("5d22cac766538458",),
    (_ATTENTION, "MLAAttention.forward"): ("a563be16e8be793e",),
    (_ATTENTION, "MLAAttention.forward_impl"): ("ad9c09b706d72ea4", "32647e2cb06ab9ef"),
    (_ATTENTION, "MLAAttention._v_up_proj"): ("b9516e53f51749b6",),
    (_ATTENTION, "MLAAttention.update_kv_cache"): ("d894a16a368ba654", "da2918b16615b3ec"),
    (_ATTENTION, "unified_mla_attention_with_output"): ("6bd177aa0d97d32c",),
    (_ATTENTION, "unified_mla_kv_cache_update"): ("201217f1e1da89ae",),
    ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding.forward_cuda"): ("b9f9a5bc20818d9d",),
    ("vllm.model_executor.layers.layernorm", "RMSNorm.forward_cuda"): ("e86da8b93c37a6fd",),
}


@lru_cache(maxsize=1)
def unknown() -> tuple[str, ...]:
    """Names of functions whose code is not one of those known, or cannot be read."""
    return tuple(path for (module, path), digests in KNOWN.items() if _digest(module, path) not in digests)


def _digest(module: str, path: str) -> str | None:
    try:
        source = inspect.getsource(compat.resolve(module, path))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
