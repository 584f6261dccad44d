"""The `bench` command as a process, against a server that streams at a known pace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5deploy.cli.bench import parse_counts
from glm5deploy.errors import UsageError
from tests.support.streaming_server import Pace, StreamingServer


def run(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5deploy", "bench", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, env=dict(os.environ))


def test_table_saved_figures_comparison_and_plot(tmp_path: Path) -> None:
    common = ("--prompt", "64", "--output", "10")
    with StreamingServer(Pace(first=0.05, between=0.01)) as server:
        first = run(tmp_path, "--url", server.url, "--concurrency", "1,2", "--save", "one.json", *common)
        server.pace.between = 0.02
        second = run(
            tmp_path,
            *("--url", server.url + "/v1", "--concurrency", "1", *common),
            *("--compare", "one.json", "--plot", "plot.png"),
        )
    assert first.returncode == 0, first.stderr
    assert "decode tok/s" in first.stdout
    assert "TPOT ms" in first.stdout
    assert "2 × 64: " in first.stderr
    saved = json.loads((tmp_path / "one.json").read_text())
    assert [p["concurrency"] for p in saved["points"]] == [1, 2]
    assert second.returncode == 0, second.stderr
    assert "compared with" in second.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object(tmp_path: Path) -> None:
    with StreamingServer(Pace(first=0.01, between=0.001)) as server:
        answer = run(tmp_path, "--url", server.url, "--concurrency", "1", "--prompt", "8", "--output", "4", "--json")
    value = json.loads(answer.stdout)
    assert value["model"] == "paced"
    assert value["points"][0]["wave"]["output_tokens"] == 4


def test_no_server_is_one_line_with_a_next_step(tmp_path: Path) -> None:
    answer = run(tmp_path, "--url", "http://127.0.0.1:9")
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: no server at http://127.0.0.1:9")
    assert "glm5deploy serve" in answer.stderr


def test_unknown_model_is_named_with_what_there_is(tmp_path: Path) -> None:
    with StreamingServer() as server:
        answer = run(tmp_path, "--url", server.url, "--model", "other")
    assert answer.returncode == 1
    assert "offers paced, not other" in answer.stderr


def test_counts() -> None:
    assert parse_counts("1k, 8K,64,64", "--prompt") == (64, 1024, 8192)
    for text in ("", "0", "1,,2", "-1", "1.5k", "99999999"):
        with pytest.raises(UsageError):
            parse_counts(text, "--prompt")


def test_ctrl_c_does_not_wait_for_long_answers(tmp_path: Path) -> None:
    options = ("--concurrency", "4", "--prompt", "8", "--output", "5000")
    with StreamingServer(Pace(first=0, between=0.05)) as server:
        command = [sys.executable, "-m", "glm5deploy", "bench", "--url", server.url, *options]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(server.pace.requests) < 1:
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "interrupted" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("option", ["--save", "--plot"])
def test_a_file_that_cannot_be_written_is_noticed_before_measuring(option: str, tmp_path: Path) -> None:
    with StreamingServer() as server:
        answer = run(tmp_path, "--url", server.url, option, "missing/one.file")
        assert not server.pace.requests
    assert answer.returncode == 2
    assert "cannot write missing/one.file" in answer.stderr
