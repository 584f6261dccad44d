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
_NORM = "vllm.model_executor.layers.layernorm"

_MOE = "vllm.model_executor.layers.fused_moe"
_RUNNER, _SHARED = f"{_MOE}.runner.moe_runner", f"{_MOE}.runner.shared_experts"
_LINEAR, _GROUPED = "vllm.model_executor.layers.linear", f"{_MOE}.router.grouped_topk_router"

# module, attribute path: the first digits of the source's SHA-256 in vLLM 0.32.0 and, where it differs, 0.33.0.
Known = dict[tuple[str, str], tuple[str, ...]]
KNOWN: dict[str, Known] = {
    "attention": {
        (_MLA, "MultiHeadLatentAttentionWrapper.forward"): ("5d22cac766538458",),
        (_ATTENTION, "MLAAttention.forward"): ("a563be16e8be793e",),
        (_ATTENTION, "MLAAttention.forward_impl"): ("ad9c09b706d72ea4", "32647e2cb06ab9ef"),
        (_ATTENTION, "MLAAttention._v_up_proj"): ("b9516e53f51749b6",),
        (_ATTENTION, "MLAAttention.update_kv_cache"): ("d894a16a368ba654", "da2918b16615b3ec"),
        (_ATTENTION, "unified_mla_attention_with_output"): ("6bd177aa0d97d32c",),
        (_ATTENTION, "unified_mla_kv_cache_update"): ("201217f1e1da89ae",),
        ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding.forward_cuda"): ("b9f9a5bc20818d9d",),
        (_NORM, "RMSNorm.forward_cuda"): ("e86da8b93c37a6fd",),
    },
    "norms": {
        (_NORM, "RMSNorm.forward_cuda"): ("e86da8b93c37a6fd",),
        (_NORM, "RMSNorm.forward_native"): ("1f37da1444707040",),
        ("vllm.kernels.vllm_c", "rms_norm.impl_fn"): ("e7799acd7c07e2df",),
        ("vllm.kernels.vllm_c", "fused_add_rms_norm.impl_fn"): ("e2c884062c2852ee",),
    },
    "experts": {
        (_RUNNER, "MoERunner.forward"): ("5227d899f9ca8872",),
        (_RUNNER, "MoERunner._forward_impl"): ("2d358e9a2a7a5b4c",),
        (_RUNNER, "MoERunner._apply_quant_method"): ("8a18de3319cf3fa0", "85ef322fafd46626"),
        (_RUNNER, "MoERunner._maybe_dispatch"): ("1e7965716d35655c",),
        (_RUNNER, "MoERunner._maybe_combine"): ("dcf0e83b81bb0f5c",),
        (_SHARED, "SharedExperts.maybe_forward_async"): ("aba9ddff3117e6b3",),
        (_SHARED, "SharedExperts.forward"): ("c2e1f1bc6f7154fc",),
        (_SHARED, "SharedExperts.wait"): ("3fda4831a51c7ac2",),
        (_SHARED, "SharedExperts.output.fget"): ("c28c155acce18087",),
        (f"{_MOE}.routed_experts", "RoutedExperts.forward_modular"): ("968dcdd772ccefb1",),
        (f"{_MOE}.router.fused_moe_router", "FusedMoERouter.select_experts"): ("b3a4bab7fd0a4015",),
    },
    "shared": {
        ("vllm.model_executor.models.deepseek_v2", "DeepseekV2MLP.forward"): ("ab63fe100a57275b",),
        (_LINEAR, "ColumnParallelLinear.forward"): ("308fabe081224a58",),
        (_LINEAR, "RowParallelLinear.forward"): ("d90bdc0c707aa085",),
        ("vllm.model_executor.layers.activation", "SiluAndMul.forward_cuda"): ("f5d916fd707788b0",),
    },
    "choice": {
        (_GROUPED, "GroupedTopKRouter._compute_routing"): ("ec1d048fb40e46d6",),
        (_GROUPED, "grouped_topk"): ("497679128f082dd8",),
        (_GROUPED, "fused_grouped_topk"): ("cc9c3347d33adfe6",),
        (f"{_MOE}.router.base_router", "BaseRouter._select_experts"): ("72be73a361f8d723",),
        ("vllm._custom_ops", "grouped_topk"): ("ec8b353ca5adbcd8", "5d0122c3fd07bfda"),
    },
}


@lru_cache(maxsize=len(KNOWN))
def unknown(part: str = "attention") -> tuple[str, ...]:
    """Names of functions of a part of the layer whose code is not one of those known, or cannot be read."""
    return tuple(path for (module, path), digests in KNOWN[part].items() if _digest(module, path) not in digests)


def obstacle(part: str = "attention") -> str | None:
    """What :func:`unknown` names keeps a part from being replaced, in words; None where all code is known."""
    names = unknown(part)
    return f"this vLLM's {', '.join(names)} is not the code that they replace" if names else None


def first(checks: dict[str, bool]) -> str | None:
    """The first obstacle, in words, whose check is false; None where nothing is in the way."""
    return next((obstacle for obstacle, fine in checks.items() if not fine), None)


def _digest(module: str, path: str) -> str | None:
    try:
        source = inspect.getsource(compat.resolve(module, path))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()[:16]
