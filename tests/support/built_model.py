"""A model built and loaded by our loader in this process: vLLM's real layers without a server around them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.serving import free_port


@contextmanager
def single_rank() -> Iterator[None]:
    """vLLM's process groups of one rank, for as long as models are built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()  # as vLLM's CPU worker does
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        cleanup_dist_env_and_memory()


def configuration(folder: Path, **arguments: Any) -> Any:
    """vLLM's configuration for a folder, as its server makes it."""
    from vllm.engine.arg_utils import EngineArgs

    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 256, **arguments}
    return EngineArgs(model=str(folder), load_format="glm5_gguf", **settings).create_engine_config()


def load(folder: Path, weights: str, **arguments: Any) -> tuple[Any, Any]:
    """The configuration a model was built with, and the model; ``weights`` is the loader's setting."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    config = configuration(folder, model_loader_extra_config={"weights": weights}, **arguments)
    with set_current_vllm_config(config):
        return config, get_model(vllm_config=config)
