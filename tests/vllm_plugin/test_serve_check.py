"""vLLM's own argument parser and registries, asked about commands as we generate them and as people change them."""

from __future__ import annotations

import pytest

from glm5deploy.vllm_plugin.serve_check import check_arguments
from tests.support.serving import facts, settings

pytestmark = pytest.mark.slow


def arguments(*extra: str, **changes: object) -> list[str]:
    from glm5deploy.server.command import build_command

    return list(build_command(settings(extra=extra, **changes), facts(), launcher=("vllm", "serve")).vllm_arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 2, "cpu_cores": (0, 1), "context": 4096, "dtype": "bfloat16"},
        {
            "device": "cuda",
            "pp": 2,
            "max_seqs": 16,
            "mtp": 3,
            "expert_parallel": True,
            "gpu_memory": 0.9,
            "custom_all_reduce": False,
            "kv_dtype": "fp8_ds_mla",
        },
    ],
)
def test_generated_commands_are_understood(changes: dict[str, object]) -> None:
    report = check_arguments(arguments(**changes))
    assert report["error"] == ""
    assert report["ok"]
    values = report["values"]
    assert values["served_model_name"] == ["tiny"]
    assert (values["load_format"], values["trust_remote_code"], values["api_key"]) == ("glm5_gguf", False, None)
    assert (values["reasoning_parser"], values["tool_call_parser"]) == ("glm45", "glm47")


@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        (("--no-such-flag",), {}, "unrecognized arguments: --no-such-flag"),
        (("--max-num-seqs", "many"), {}, "--max-num-seqs: invalid int value: 'many'"),
        ((), {"reasoning_parser": "glm99"}, "this vLLM has no reasoning parser 'glm99'; it knows "),
        ((), {"tool_parser": "glm99"}, "this vLLM has no tool parser 'glm99'; it knows "),
    ],
)
def test_refusals_say_why(extra: tuple[str, ...], changes: dict[str, object], message: str) -> None:
    report = check_arguments(arguments(*extra, **changes))
    assert not report["ok"]
    assert message in report["error"]


def test_an_abbreviation_shows_in_the_values() -> None:
    assert check_arguments(arguments("--trust-remote"))["values"]["trust_remote_code"] is True
