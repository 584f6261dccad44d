"""The `plan` command on the real models' headers: sparse files here, and byte ranges from a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glm5deploy.demo.local_hub import LocalHub
from tests.support.data import SET_A
from tests.support.real_headers import UnhashedBlob, write_real_set

TINY = SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL"
REPO = "unsloth/GLM-5.2-GGUF"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_real_set(tmp_path_factory.mktemp("real") / "UD-Q4_K_XL")


def run(cwd: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5deploy", "plan", *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def planned(cwd: Path, *args: str, code: int = 0, **environment: str) -> dict[str, Any]:
    answer = run(cwd, *args, "--json", **environment)
    assert answer.returncode == code, answer.stderr + answer.stdout[-2000:]
    value: dict[str, Any] = json.loads(answer.stdout)
    return value


def test_eight_rtx_pro_6000(tmp_path: Path, shards: list[Path]) -> None:
    plan = planned(tmp_path, str(shards[3]), "--gpus", "8x RTX PRO 6000")
    assert plan["fits"] is True
    assert plan["layout"] == {"tp": 8, "pp": 1, "ep": False, "obstacles": []}
    (gpu,) = plan["per_gpu"]
    assert gpu["weights_bytes"] == pytest.approx(58e9, rel=0.01)
    parts = ("weights_bytes", "activations_bytes", "graphs_bytes", "runtime_bytes", "free_for_cache_bytes")
    assert sum(gpu[part] for part in parts) == gpu["usable_bytes"]
    assert sum(role["fullest_gpu_bytes"] for role in plan["weights"]) == gpu["weights_bytes"]
    assert plan["cache"]["token_bytes"] == 92_628
    # Field reports for this machine, with weights of 54 GB a GPU: about 320,000 tokens.
    assert plan["cache"]["tokens"] == pytest.approx(320_000, rel=0.05)
    assert "--disable-custom-all-reduce" in plan["commands"]["vllm"]
    assert "--tensor-parallel-size 8" in plan["commands"]["vllm"]
    assert plan["commands"]["serve"].startswith("glm5deploy serve --tp 8 --workdir ")
    assert "prepare" not in plan["commands"]


def test_four_are_too_few_and_the_exit_code_says_so(tmp_path: Path, shards: list[Path]) -> None:
    plan = planned(tmp_path, str(shards[0].parent), "--gpus", "4x RTX PRO 6000", code=1)
    assert plan["fits"] is False
    assert "commands" not in plan
    assert plan["per_gpu"][0]["free_for_cache_bytes"] < -20e9
    assert any("6 of these GPUs would do" in note for note in plan["notes"])


def test_layouts_that_cannot_be_say_why(tmp_path: Path, shards: list[Path]) -> None:
    rows = planned(tmp_path, str(shards[0]), "--gpus", "16x A100 40 GB")["layouts"]
    by_layout = {(row["tp"], row["pp"], row["ep"]): row for row in rows}
    assert "cuts Q5_K blocks: 128 of 2048 columns a rank, blocks of 256" in by_layout[16, 1, False]["because"]
    assert "Q5_K" not in by_layout[16, 1, True]["because"], "whole experts are not cut"
    assert by_layout[8, 2, False]["possible"]
    assert "GB too much on a GPU" in by_layout[1, 16, False]["because"]
    rows = planned(tmp_path, str(shards[0]), "--gpus", "6x RTX PRO 6000")["layouts"]
    assert "6 ranks do not divide 64 attention heads" in rows[0]["because"]
    assert {(row["tp"], row["pp"]) for row in rows if row["possible"]} == {(2, 3)}


def test_stages_begin_with_an_indexer(tmp_path: Path, shards: list[Path]) -> None:
    plan = planned(tmp_path, str(shards[0]), "--gpus", "16x A100 40 GB", "--tp", "8", "--pp", "2")
    assert [stage["layers"] for stage in plan["per_gpu"]] == [38, 40]
    assert plan["commands"]["serve"].startswith("glm5deploy serve --nodes HOST1,HOST2 --tp 8 --pp 2 ")
    assert "--pipeline-parallel-size 2" in plan["commands"]["vllm"]
    assert plan["commands"]["vllm"].startswith("VLLM_ENGINE_READY_TIMEOUT_S=600 ")
    assert " VLLM_PP_LAYER_PARTITION=38,40 " in plan["commands"]["vllm"]


def test_context_mtp_and_cache_type_count(tmp_path: Path, shards: list[Path]) -> None:
    options = ("--context", "131072", "--kv-dtype", "fp8_ds_mla", "--mtp", "3", "--tp", "8")
    plan = planned(tmp_path, str(shards[0]), "--gpus", "8x A100", *options)
    assert plan["cache"]["token_bytes"] == 53_940 + 656 + 132
    assert plan["cache"]["sequences_of_that_context"] == plan["cache"]["tokens"] // 131_072 > 0
    assert "--mtp 3" in plan["commands"]["serve"]
    assert '"num_speculative_tokens": 3' in plan["commands"]["vllm"]
    mtp = next(role for role in plan["weights"] if role["role"] == "mtp")
    assert mtp["fullest_gpu_bytes"] > 150e6
    too_long = planned(tmp_path, str(shards[0]), "--gpus", "8x A100", "--context", "1000000", code=1)
    assert any("fewer than the context of 1000000" in note for note in too_long["notes"])


def test_a_repository_is_planned_from_headers_alone(tmp_path: Path, shards: list[Path]) -> None:
    files = {f"UD-Q4_K_XL/{path.name}": UnhashedBlob(path, path.stat().st_size) for path in shards}
    with LocalHub() as hub:
        commit = hub.repository(REPO).publish(files)
        plan = planned(tmp_path, f"{REPO}:UD-Q4_K_XL", "--gpus", "8x H200", HF_ENDPOINT=hub.endpoint)
        read = hub.served["bytes"]
    size = sum(path.stat().st_size for path in shards)
    assert size > 400e9
    assert read < 20e6
    assert plan["model"] | {"commit": commit, "bytes": size, "files": len(shards)} == plan["model"]
    assert plan["disk"]["fetch_bytes"] == plan["disk"]["no_merge_bytes"] == size
    assert plan["disk"]["with_merge_bytes"] == 2 * size
    assert plan["times"]["fetch_seconds"] == pytest.approx(size / 110e6)
    assert plan["commands"]["prepare"].startswith(f"glm5deploy run {REPO}:UD-Q4_K_XL --until install")
    assert "--served-model-name GLM-5.2" in plan["commands"]["vllm"]
    assert not (tmp_path / "glm5deploy-work").exists()


def test_a_table_on_stdout_and_notes_on_stderr(tmp_path: Path) -> None:
    answer = run(tmp_path, str(TINY), "--gpus", "2x RTX 3090", "--tp", "1", "--pp", "2")
    assert answer.returncode == 0, answer.stderr
    for words in (
        "per gpu:",
        "bits per weight",
        "free for cache",
        "cuts Q5_K blocks",
        "glm5deploy serve --tp 1 --pp 2",
    ):
        assert words in answer.stdout
    assert "\x1b" not in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "plan needs a model"),
        (("no/such/file",), 2, "no such file or folder, and not a repository's name"),
        ((str(TINY), "--gpus", "9x Voodoo"), 2, "no GPU known here"),
        ((str(TINY), "--gpus", "2x H200", "--tp", "3"), 1, "3 ranks do not divide 4 attention heads"),
        ((str(TINY), "--gpus", "2x H200", "--context", "300000"), 2, "at most 202752 tokens"),
        ((str(TINY), "--gpus", "2x H200", "--indexer-schedule", "FF"), 2, "has 2 letters; the model has 4 layers"),
    ],
)
def test_what_cannot_be_planned(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    arguments = arguments if "--gpus" in arguments else (*arguments, "--gpus", "8x H200")
    answer = run(tmp_path, *arguments)
    assert answer.returncode == code, answer.stderr
    assert words in answer.stdout + answer.stderr


def test_settings_of_a_file_are_used(tmp_path: Path) -> None:
    (tmp_path / "preset.toml").write_text('[serve]\ntp = 1\npp = 2\ncontext = 4096\n[model]\nrepo = "x/y"\n')
    plan = planned(tmp_path, str(TINY), "--gpus", "2x H200", "--config", "preset.toml")
    assert (plan["layout"]["pp"], plan["cache"]["context"]) == (2, 4096)
    assert "--config preset.toml --workdir" in plan["commands"]["serve"]
