"""Registering is lazy, repeatable and leaves other models alone; a configuration of ours is changed as documented."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5deploy.vllm_plugin import (
    ARCHITECTURE,
    BACKEND,
    LOAD_FORMAT,
    QUANTIZATION,
    compat,
    cpu,
    register,
)
from glm5deploy.vllm_plugin.engine_config import logger, prepare
from tests.vllm_plugin.conftest import Run


def child(code: str, *, stdin: bytes = b"") -> str:
    result = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, timeout=300)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_importing_the_plugin_loads_nothing() -> None:
    code = "import sys, glm5deploy.vllm_plugin; print([m for m in ('torch', 'vllm', 'numpy') if m in sys.modules])"
    assert child(code).strip() == "[]"


def test_registering_twice_changes_nothing_the_second_time() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def registries() -> tuple[Any, ...]:
        return (
            dict(_LOAD_FORMAT_TO_MODEL_LOADER),
            dict(MODELS_CONFIG_MAP),
            list(QUANTIZATION_METHODS),
            dict(AttentionBackendEnum.__members__),
        )

    register()
    once = registries()
    register()
    assert registries() == once
    assert LOAD_FORMAT in once[0]
    assert once[2].count(QUANTIZATION) == 1
    assert BACKEND in once[3]


def test_an_unsupported_version_is_left_alone_with_a_warning() -> None:
    code = (
        "import logging; logging.basicConfig(); from glm5deploy.vllm_plugin import compat, register\n"
        "compat.vllm_version = lambda: '0.99.1'\n"
        "register()\n"
        "from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as backends\n"
        f"print({LOAD_FORMAT!r} in loaders, {BACKEND!r} in backends.__members__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip().endswith("False False")
    assert "works with vLLM 0.32 and 0.33 and leaves vLLM 0.99.1 alone" in result.stderr + result.stdout


@pytest.mark.parametrize(
    ("version", "good"),
    [("0.32.0", True), ("0.33.1+cpu", True), ("0.31.9", False), ("0.34.0", False), ("0.320.0", False), (None, False)],
)
def test_supported_versions(version: str | None, good: bool) -> None:
    assert compat.is_supported(version) is good


def test_the_backend_reaches_a_process_that_has_not_registered_it() -> None:
    from glm5deploy.vllm_plugin.registration import attention_backend

    code = (
        "import pickle, sys; member = pickle.loads(sys.stdin.buffer.read())\n"
        "from vllm.platforms.cpu import CpuPlatform\n"
        "print(member.name, member.get_class().__name__, CpuPlatform._glm5deploy)"
    )
    out = child(code, stdin=pickle.dumps(attention_backend()))
    assert out.split()[-3:] == [BACKEND, "Glm5SparseBackend", "True"]


def config(folder: Path, **arguments: Any) -> Any:
    """The configuration that vLLM makes of these engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    register()
    return EngineArgs(model=str(folder), max_model_len=2048, **arguments).create_engine_config()


@pytest.fixture(scope="module")
def folder(model_folder: Callable[[Run], Path]) -> Path:
    return model_folder(Run("A"))


def test_our_load_format_brings_our_backend_and_what_the_cpu_needs(folder: Path) -> None:
    made = config(folder, load_format=LOAD_FORMAT, max_num_batched_tokens=256, enable_prefix_caching=True)
    assert made.attention_config.backend.name == BACKEND
    assert made.model_config.model_class_overrides == {ARCHITECTURE: "glm5deploy.vllm_plugin.model:Glm5ForCausalLM"}
    assert made.compilation_config.custom_ops == ["none"]
    assert made.model_config.enforce_eager
    assert made.scheduler_config.enable_chunked_prefill
    assert made.scheduler_config.max_num_batched_tokens == 256
    assert made.cache_config.enable_prefix_caching
    assert made.cache_config.block_size == 64


@pytest.mark.parametrize("asked", [{"custom_ops": ["all"]}, {"custom_ops": ["none", "+rms_norm"]}])
def test_custom_ops_that_were_asked_for_stay(asked: dict[str, Any], folder: Path) -> None:
    made = config(folder, load_format=LOAD_FORMAT, compilation_config=asked)
    assert made.compilation_config.custom_ops == asked["custom_ops"]


def test_another_load_format_leaves_the_same_model_to_vllm(folder: Path) -> None:
    made = config(folder, load_format="dummy")
    assert made.attention_config.backend is None
    assert made.model_config.model_class_overrides == {}
    assert not made.scheduler_config.enable_chunked_prefill  # vLLM's own limit on a CPU


def test_a_backend_of_vllm_is_kept_with_our_loader(folder: Path) -> None:
    made = config(folder, load_format=LOAD_FORMAT, attention_backend="CPU_MLA")
    assert made.attention_config.backend.name == "CPU_MLA"
    assert made.model_config.model_class_overrides == {}


def test_our_backend_by_name_without_our_loader(folder: Path) -> None:
    made = config(folder, load_format="dummy", attention_backend=BACKEND)
    assert made.model_config.model_class_overrides == {ARCHITECTURE: "glm5deploy.vllm_plugin.model:Glm5ForCausalLM"}


def test_the_quantisation_is_known_and_dense(folder: Path) -> None:
    made = config(folder, load_format=LOAD_FORMAT, quantization=QUANTIZATION)
    assert made.quant_config.get_name() == QUANTIZATION


@pytest.mark.parametrize("parallel", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused_with_a_reason(parallel: str) -> None:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, parallel: 2}
    words = parallel.replace("_parallel_size", " parallelism").replace("_", " ")
    with pytest.raises(ValueError, match=f"does not support {words}: a rank would select from its own shard"):
        prepare(SimpleNamespace(parallel_config=SimpleNamespace(**sizes)))


def settings(dtype: str, cache_dtype: str, **config: Any) -> Any:
    """What `engine_config.prepare` reads of an engine's configuration; ``config`` is put into the model's."""
    import torch
    from vllm.config import ParallelConfig

    glm = {"indexer_rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return SimpleNamespace(
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(
            dtype=getattr(torch, dtype), hf_config=SimpleNamespace(**glm | config), model_class_overrides={}
        ),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        attention_config=SimpleNamespace(backend=None),
        additional_config={},
    )


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "words"),
    [
        ("float32", "auto", "computes in bfloat16 or float16 on a GPU, not in float32. Use --dtype bfloat16"),
        ("float16", "bfloat16", "in the model's type, float16, or packed, not in bfloat16. Use --kv-cache-dtype auto"),
        ("bfloat16", "float16", "in the model's type, bfloat16, or packed, not in float16. Use --kv-cache-dtype auto"),
        ("bfloat16", "fp8", "not in fp8. Use --kv-cache-dtype auto, or fp8_ds_mla for a smaller cache"),
    ],
)
def test_types_that_the_kernels_cannot_read_are_refused(
    dtype: str, cache_dtype: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    with pytest.raises(ValueError, match=re.escape(words)):
        prepare(settings(dtype, cache_dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla", None])
def test_types_that_the_kernels_read(dtype: str, cache_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_cpu", lambda: False)
    asked = settings(dtype, cache_dtype or dtype)
    prepare(asked)
    assert asked.attention_config.backend.name == BACKEND


def test_a_cpu_computes_in_float32() -> None:
    asked = settings("float32", "auto")
    prepare(asked)
    assert asked.attention_config.backend.name == BACKEND


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave is False (GLM-5: True)"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax' (GLM-5: 'sigmoid')"),
        ({"topk_method": None}, "topk_method is None (GLM-5: 'noaux_tc')"),
    ],
)
def test_a_configuration_unlike_glm5_is_pointed_out(
    change: dict[str, Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
    prepare(settings("float32", "auto", **change))
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


def test_kernels_are_warmed_for_the_block_size_that_vllm_settles_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from glm5deploy.vllm_plugin import device, indexer

    asked: list[Any] = []
    monkeypatch.setattr(device, "reserve", lambda serving, where: asked.append(serving))
    made = settings("bfloat16", "auto")
    made.speculative_config = None
    made.cache_config.block_size = 16  # vLLM's default while the model is built
    made.scheduler_config = SimpleNamespace(max_num_batched_tokens=256)
    made.model_config.max_model_len = 2048
    model = SimpleNamespace(num_attention_heads=8, index_n_heads=32, index_topk=64, q_lora_rank=96, qk_nope_head_dim=48)
    model.hidden_size, model.v_head_dim, model.n_routed_experts = 80, 64, 24
    for fusion in ("off", "latent", "query", "norms", "experts"):
        made.additional_config = {"glm5_fusion": fusion}
        indexer._reserve(made, model)
    assert {(serving.block_size, serving.dtype) for serving in asked} == {(64, torch.bfloat16)}
    found = [(serving.query_rank, serving.query_nope, serving.width) for serving in asked]
    assert found == [(0, 0, 0), (96, 0, 0), (96, 48, 0), (96, 48, 80), (96, 48, 80)]
    found = [(serving.values, serving.experts, serving.index_at_once) for serving in asked]
    assert found == [(0, 0, False)] * 4 + [(64, 24, True)]
