"""plan, bench and chat against a real start: what was predicted, what is measured, what is answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glm5deploy.config import load_config
from glm5deploy.glm_dsa.memory import ParallelLayout, cache_bytes_per_token, weight_bytes_per_rank
from glm5deploy.server.metrics_text import read_counters
from glm5deploy.stages.model_headers import open_headers
from glm5deploy.stages.planning import make_model_table
from tests.support.data import REPOSITORY, SET_A
from tests.support.engine import NAME, Engine, engine
from tests.support.folders import write_folder_of

SHARDS = SET_A / "GLM-tiny-A-GGUF" / "UD-Q4_K_XL"

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    work = tmp_path_factory.mktemp("clients")
    folder = write_folder_of(SHARDS, work / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        flags = ("--worker-extension-cls", "tests.support.worker_sizes.WorkerSizes")
        with engine(folder, work / "engine", dtype="bfloat16", flags=flags) as running:
            yield running


def glm5deploy(cwd: Path, *args: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5deploy", *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, input=given, timeout=300)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def test_predicted_weights_are_those_that_were_loaded(served: Engine) -> None:
    model = make_model_table(open_headers(str(SHARDS)), load_config(None, {}, {}))
    (predicted,) = weight_bytes_per_rank(model.plan.used, model.tensors, model.hparams, ParallelLayout(), dense=True)
    answer = httpx.post(f"{served.url}/collective_rpc", json={"method": "weight_bytes"}, timeout=60)
    (loaded,) = map(int, answer.json()["results"])
    assert predicted == pytest.approx(loaded, rel=0.01)


def test_predicted_tokens_are_those_that_the_cache_got(served: Engine) -> None:
    model = make_model_table(open_headers(str(SHARDS)), load_config(None, {}, {}))
    predicted = (1 << 30) // cache_bytes_per_token(model.hparams, model.schedule)
    (told,) = re.findall(r"KV cache size: ([\d,]+) tokens", served.log.read_text())
    assert int(told.replace(",", "")) == pytest.approx(predicted, rel=0.002)
    assert read_counters(httpx.get(f"{served.url}/metrics").text).kv_tokens == int(told.replace(",", ""))


def test_bench_measures_the_server(served: Engine, tmp_path: Path) -> None:
    output = 32  # a busy server sends several tokens in a piece, but hardly all of these
    options = ("--concurrency", "1,4", "--prompt", "32,200,4k", "--output", str(output), "--save", "b.json", "--json")
    glm5deploy(tmp_path, "bench", "--url", served.url, *options)
    record: dict[str, Any] = json.loads((tmp_path / "b.json").read_text())
    points = {(p["prompt"], p["concurrency"]): p for p in record["points"]}
    assert set(points) == {(prompt, c) for prompt in (32, 200, 4096) for c in (1, 4)}
    for (prompt, concurrency), point in points.items():
        if prompt == 4096:
            assert point["wave"] is None
            assert f"needs a context of {4096 + output} tokens, the server allows 2048" in point["note"]
            continue
        wave = point["wave"]
        assert (wave["prompt_tokens"], wave["output_tokens"]) == (prompt, output * concurrency)
        assert 0 < wave["ttft_median"] <= wave["ttft_p95"] < wave["seconds"]
        assert wave["tpot_median"] > 0
        # All tokens but the first piece's, at the median pace, take about the time that was left for them.
        assert wave["output_rate"] == pytest.approx(wave["output_tokens"] / wave["seconds"])
    assert points[32, 1]["note"] == ""


def test_chat_answers_through_a_pipe(served: Engine, tmp_path: Path) -> None:
    options = ("--max-tokens", "8", "--temperature", "0")
    answers = {
        glm5deploy(tmp_path, "chat", "--url", served.url, *options, given="What is an indexer?").stdout for _ in "ab"
    }
    (answer,) = answers
    assert answer.strip()
    shown = json.loads(
        glm5deploy(tmp_path, "chat", "What is an indexer?", "--url", served.url, "--json", *options).stdout
    )
    assert shown["tokens"] == 8
    assert shown["content"] + "\n" == answer


def test_the_servers_model_is_found(served: Engine, tmp_path: Path) -> None:
    assert (
        json.loads(
            glm5deploy(
                *(tmp_path, "bench", "--url", served.url, "--json"),
                *("--concurrency", "1", "--prompt", "8", "--output", "2"),
            ).stdout
        )["model"]
        == NAME
    )
