"""What :func:`glm5deploy.vllm_plugin.register` does: names into vLLM's public registries, nothing else."""

from __future__ import annotations

import logging
from typing import Any

from glm5deploy.vllm_plugin import ARCHITECTURE, BACKEND, LOAD_FORMAT, QUANTIZATION, compat, cpu

logger = logging.getLogger("vllm.glm5deploy")

BACKEND_PATH = "glm5deploy.vllm_plugin.attention.Glm5SparseBackend"


def register_all() -> None:
    """Register loader, quantisation, backend and configuration hook, each unless it is there already."""
    version = compat.vllm_version()
    if not compat.is_supported(version):
        supported = " and ".join(compat.SUPPORTED)
        logger.warning("glm5deploy works with vLLM %s and leaves vLLM %s alone", supported, version)
        return
    _register_loader()
    _register_quantization()
    attention_backend()
    _register_config_hook()


def attention_backend() -> Any:
    """The member of vLLM's backend enumeration that stands for ours, made when it is missing.

    A member made at run time cannot be unpickled by a process that has not made it yet, and vLLM unpickles its
    configuration before it loads plugins: so the member pickles as a call of `_received_backend`.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    member = AttentionBackendEnum.__members__.get(BACKEND)
    if member is None:
        member = AttentionBackendEnum.register(BACKEND, BACKEND_PATH)
        member.__reduce_ex__ = lambda protocol: (_received_backend, ())
    return member


def _received_backend() -> Any:
    """The member, in a process that was handed a configuration which names it: what the platform needs comes along."""
    if cpu.is_cpu():
        cpu.install()
    return attention_backend()


def _register_loader() -> None:
    from vllm.model_executor import model_loader

    from glm5deploy.vllm_plugin.loader import Glm5GgufLoader

    if model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not Glm5GgufLoader:
        model_loader.register_model_loader(LOAD_FORMAT)(Glm5GgufLoader)


def _register_quantization() -> None:
    from vllm.model_executor.layers import quantization

    from glm5deploy.vllm_plugin.quantization import Glm5GgufConfig

    if QUANTIZATION not in quantization.QUANTIZATION_METHODS:
        quantization.register_quantization_config(QUANTIZATION)(Glm5GgufConfig)


def _register_config_hook() -> None:
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from glm5deploy.vllm_plugin.engine_config import wrap

    MODELS_CONFIG_MAP[ARCHITECTURE] = wrap(MODELS_CONFIG_MAP[ARCHITECTURE])
