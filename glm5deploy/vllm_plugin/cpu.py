"""The CPU engine: vLLM refuses sparse attention there, so two decisions of its platform class are taken over.

Both apply to a configuration that names our backend and to nothing else, and are installed only once such a
configuration exists.
"""

from __future__ import annotations

import functools
from typing import Any

from glm5deploy.vllm_plugin import BACKEND, cpu_pipeline

_MARK = "_glm5deploy"
_BLOCK_SIZE = 64


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def prepare(vllm_config: Any) -> None:
    """Settings the CPU engine needs: no compilation unless asked for, and vLLM's plain torch layers.

    vLLM's CPU RoPE kernel corrupts queries of more than one head in eager mode; the torch layer is exact.
    """
    if not is_cpu():
        return
    install()
    compilation = vllm_config.compilation_config
    if compilation.mode is None:
        vllm_config.model_config.enforce_eager = True
    if not {"all", "none"} & set(compilation.custom_ops):
        compilation.custom_ops.append("none")


def install() -> None:
    """Take over the platform's choice of backend and its limits for MLA models; repeatable."""
    from vllm.platforms.cpu import CpuPlatform

    if getattr(CpuPlatform, _MARK, False):
        return
    CpuPlatform.get_attn_backend_cls = classmethod(_choose(CpuPlatform.get_attn_backend_cls.__func__))
    CpuPlatform.check_and_update_config = classmethod(_limit(CpuPlatform.check_and_update_config.__func__))
    cpu_pipeline.install()
    setattr(CpuPlatform, _MARK, True)


def _choose(original: Any) -> Any:
    from vllm.logger import init_logger

    logger = init_logger("vllm.glm5deploy")

    @functools.wraps(original)
    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        sparse = attn_selector_config.use_mla and attn_selector_config.use_sparse
        if sparse and selected_backend is not None and selected_backend.name == BACKEND:
            logger.info_once("Using %s attention backend (torch).", BACKEND)
            return selected_backend.get_path()
        return original(cls, selected_backend, attn_selector_config, num_heads)

    return get_attn_backend_cls


def _limit(original: Any) -> Any:
    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        backend = vllm_config.attention_config.backend
        if backend is None or backend.name != BACKEND:
            original(cls, vllm_config)
            return
        # vLLM's own CPU MLA kernel knows one block size and neither chunked prefill nor prefix caching; ours does.
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        chunked, budget = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens
        prefix, block = cache.enable_prefix_caching, cache.block_size
        original(cls, vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens = chunked, budget
        cache.enable_prefix_caching = prefix
        cache.block_size = block if cache.user_specified_block_size and block % _BLOCK_SIZE == 0 else _BLOCK_SIZE

    return check_and_update_config
