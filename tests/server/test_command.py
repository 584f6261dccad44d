"""The whole command is compared, not bits of it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.server.command import build_command, vllm_launcher
from glm5deploy.server.flags import graph_sizes
from glm5deploy.server.variables import cpu_binding
from tests.support.serving import facts, settings

VLLM = ("vllm", "serve")


def test_cpu_command() -> None:
    command = build_command(
        settings(tp=2, cpu_cores=(0, 1), ready_timeout=300.4, port=8123), facts(hidden_size=256), launcher=VLLM
    )
    assert command.argv == (
        *("vllm", "serve", "/models/glm"),
        *("--load-format", "glm5_gguf"),
        *("--served-model-name", "tiny"),
        *("--host", "127.0.0.1"),
        *("--port", "8123"),
        *("--tensor-parallel-size", "2"),
        *("--dtype", "auto"),
        *("--kv-cache-dtype", "auto"),
        *("--max-model-len", "auto"),
        *("--attention-backend", "GLM5_TRITON_SPARSE"),
        *("--reasoning-parser", "glm45"),
        *("--tool-call-parser", "glm47"),
        "--enable-auto-tool-choice",
        "--enforce-eager",
        *("--compilation-config", '{"custom_ops": ["none"]}'),
    )
    assert command.env == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "300",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    }
    flags = {word for word in command.argv if word.startswith("--")}
    assert set(command.reasons) == flags | set(command.env)
    assert all(command.reasons.values())


def test_gpu_command() -> None:
    command = build_command(
        settings(
            device="cuda",
            tp=8,
            pp=2,
            context=131072,
            dtype="bfloat16",
            kv_dtype="fp8_ds_mla",
            max_seqs=16,
            mtp=3,
            expert_parallel=True,
            gpu_memory=0.93,
            custom_all_reduce=False,
            cache_dir=Path("/cache"),
            ready_timeout=1800,
            extra=("--seed", "7"),
        ),
        facts(),
        "quantised",
        launcher=VLLM,
    )
    assert command.argv == (
        *("vllm", "serve", "/models/glm"),
        *("--load-format", "glm5_gguf"),
        *("--served-model-name", "tiny"),
        *("--host", "127.0.0.1"),
        *("--port", "8000"),
        *("--tensor-parallel-size", "8"),
        *("--dtype", "bfloat16"),
        *("--kv-cache-dtype", "fp8_ds_mla"),
        *("--max-model-len", "131072"),
        *("--model-loader-extra-config", '{"weights": "quantised"}'),
        *("--attention-backend", "GLM5_TRITON_SPARSE"),
        *("--pipeline-parallel-size", "2"),
        "--enable-expert-parallel",
        *("--max-num-seqs", "16"),
        *("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}'),
        *("--reasoning-parser", "glm45"),
        *("--tool-call-parser", "glm47"),
        "--enable-auto-tool-choice",
        *("--gpu-memory-utilization", "0.93"),
        "--disable-custom-all-reduce",
        *("--compilation-config", '{"cudagraph_capture_sizes": [4, 8, 16, 32, 64]}'),
        *("--seed", "7"),
    )
    assert command.env == {
        "VLLM_ENGINE_READY_TIMEOUT_S": "1800",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "TRITON_CACHE_DIR": "/cache/triton",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    assert command.vllm_arguments == command.argv[2:]


def test_native_attention_names_no_backend() -> None:
    command = build_command(settings(attention="native", device="cuda"), facts(), launcher=VLLM)
    assert "--attention-backend" not in command.argv


@pytest.mark.parametrize(
    ("extra", "replaced"),
    [
        (("--max-model-len", "5"), ("--max-model-len", "auto")),
        (("--max_model_len=5",), ("--max-model-len", "auto")),
        (("-cc", "{}"), ("--compilation-config", '{"custom_ops": ["none"]}')),
        (("--no-enforce-eager",), ("--enforce-eager",)),
    ],
)
def test_a_flag_after_the_dashes_replaces_the_generated_one(extra: tuple[str, ...], replaced: tuple[str, ...]) -> None:
    plain = build_command(settings(), facts(), launcher=VLLM).argv
    command = build_command(settings(extra=extra), facts(), launcher=VLLM)
    at = plain.index(replaced[0])
    assert command.argv == (*plain[:at], *plain[at + len(replaced) :], *extra)
    assert command.reasons[replaced[0]] == "replaced by what stands after --"


def test_parsers_follow_the_tokenizer_and_can_be_named() -> None:
    bare = build_command(settings(), facts(special_tokens=frozenset()), launcher=VLLM)
    assert not {"--reasoning-parser", "--tool-call-parser", "--enable-auto-tool-choice"} & set(bare.argv)
    named = build_command(
        settings(reasoning_parser="qwen3", tool_parser="none"), facts(special_tokens=frozenset()), launcher=VLLM
    )
    assert named.argv[named.argv.index("--reasoning-parser") + 1] == "qwen3"
    assert "--tool-call-parser" not in named.argv


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"context": 202753}, {}, "--context 202753: the model was made for at most 202752 tokens"),
        ({}, {"has_chat_template": False}, "no chat template"),
        ({"mtp": 3}, {"mtp_layers": 0}, "no MTP block"),
        ({"tp": 3, "cpu_cores": (0, 1)}, {}, "needs a core for each rank, this process may use 2"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], model: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_command(settings(**changes), facts(**model), launcher=VLLM)


def test_a_chat_template_may_be_given_by_hand() -> None:
    extra = ("--chat-template", "/t.jinja")
    command = build_command(settings(extra=extra), facts(has_chat_template=False), launcher=VLLM)
    assert command.argv[-2:] == extra


def test_variables_that_are_set_already_stay() -> None:
    command = build_command(settings(), facts(), environment={"HF_HUB_OFFLINE": "0"}, launcher=VLLM)
    assert "HF_HUB_OFFLINE" not in command.env
    assert command.reasons["HF_HUB_OFFLINE"] == "already set in the environment"
    assert command.env["VLLM_NO_USAGE_STATS"] == "1"


def test_cores_are_dealt_out_evenly() -> None:
    assert cpu_binding((0, 1), 2) == "0|1"
    assert cpu_binding((0, 1, 2, 3, 8, 9, 10), 2) == "0,1,2|3,8,9"
    assert cpu_binding((4, 5), 1) == "4,5"


def test_graph_sizes() -> None:
    assert graph_sizes(1, 0) == [1]
    assert graph_sizes(20, 0) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(8, 3) == [4, 8, 16, 32]
    assert graph_sizes(256, 0) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 160, 192, 224, 256]


def test_the_command_can_be_pasted() -> None:
    command = build_command(settings(extra=("--seed", "1")), facts(), launcher=VLLM)
    assert command.shell().startswith("VLLM_ENGINE_READY_TIMEOUT_S=600 HF_HUB_OFFLINE=1 ")
    assert """--compilation-config '{"custom_ops": ["none"]}' --seed 1""" in command.shell()


def test_the_launcher_is_one_that_the_installed_wheel_has() -> None:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        assert vllm_launcher() == (sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model")
    else:
        assert vllm_launcher() == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
