from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from glm5deploy.server.state import ServerState, state_path, write_state

HEAVY = ("torch", "vllm", "huggingface_hub", "numpy", "httpx", "gguf", "triton", "transformers")


def glm5deploy(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "glm5deploy", *args]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})}
    )


def test_starting_imports_nothing_heavy() -> None:
    code = f"import sys, glm5deploy.cli.app; print([m for m in {HEAVY!r} if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_help_costs_little_more_than_the_libraries_it_is_shown_with(tmp_path: Path) -> None:
    """CPU time of both, side by side: on a shared machine neither wall time nor a number of seconds says much."""

    def seconds(*words: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, timeout=60, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    libraries = "import typer.rich_utils, rich.console, rich.table, psutil, json, logging, tomllib, urllib.request"
    pairs = ((seconds("-m", "glm5deploy", "--help"), seconds("-c", libraries)) for _ in range(20))
    assert any(ours < 1.6 * theirs for ours, theirs in pairs)


def test_status_of_nothing_is_stale_with_reasons_and_exit_code_3(tmp_path: Path) -> None:
    answer = glm5deploy("status", "--json", "--workdir", "w", cwd=tmp_path)
    assert answer.returncode == 3
    stages = {s["stage"]: s for s in json.loads(answer.stdout)["stages"]}
    assert list(stages) == ["fetch", "merge", "patch", "install", "serve"]
    assert stages["fetch"]["status"] == "to do"
    assert stages["merge"] == {"stage": "merge", "status": "waits", "reasons": ["fetch comes first"]}
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("words", [("status", "--no-such-option"), ("run", "--tp", "many"), ("no-such-command",)])
def test_a_mistyped_command_line_is_one_json_object_as_well(words: tuple[str, ...], tmp_path: Path) -> None:
    answer = glm5deploy(*words, "--json", cwd=tmp_path)
    assert answer.returncode == 2
    error = json.loads(answer.stdout)["error"]
    assert error["exit_code"] == 2
    assert error["message"]


def test_status_shows_the_server_that_runs(tmp_path: Path) -> None:
    me = psutil.Process()
    state = ServerState("ready", me.pid, me.create_time(), me.pid, me.create_time(), "http://h:1", "glm", "log")
    write_state(state_path(tmp_path), state)
    answer = json.loads(glm5deploy("status", "--json", "--workdir", str(tmp_path), cwd=tmp_path).stdout)
    assert answer["server"] == {"name": "glm", "url": "http://h:1", "phase": "ready"}
    write_state(state_path(tmp_path), replace(state, guard_started=me.create_time() - 60))
    answer = json.loads(glm5deploy("status", "--json", "--workdir", str(tmp_path), cwd=tmp_path).stdout)
    assert answer["server"] is None, "an id that is used again is no server of ours"


def test_a_pipe_gets_no_colour_codes_and_data_go_to_stdout(tmp_path: Path) -> None:
    answer = glm5deploy("status", cwd=tmp_path)
    assert "\x1b" not in answer.stdout + answer.stderr
    assert "has not succeeded yet" in answer.stdout
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["reset", "bake"], 2, "there is no stage 'bake'"),
        (["run", "--from", "serve", "--until", "fetch"], 2, "serve comes after fetch"),
        (["status", "--config", "none.toml"], 2, "cannot read the configuration none.toml"),
        (["merge"], 1, "merge needs fetch"),
        (["patch"], 1, "patch needs "),
        (["install"], 1, "install needs patch"),
        (["serve"], 1, "serve needs "),
    ],
)
def test_errors_are_one_line_with_a_next_step(tmp_path: Path, args: list[str], code: int, message: str) -> None:
    answer = glm5deploy(*args, cwd=tmp_path)
    assert answer.returncode == code
    first, second = answer.stderr.strip().splitlines()[-2:]
    assert first.startswith("error: ")
    assert message in first
    assert second.startswith("hint: ")
    assert answer.stdout == ""
    as_json = glm5deploy(*args, "--json", cwd=tmp_path)
    assert as_json.returncode == code
    assert message in json.loads(as_json.stdout)["error"]["message"]


def test_an_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    assert glm5deploy("status", "--nonsense", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_ends_with_130_and_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import glm5deploy.cli.app as a, time, signal\n"
        "def wait():\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "a.app.command('wait')(a.boundary(wait))\na.main()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, "wait"], stdout=-1, stderr=-1, text=True, cwd=tmp_path)
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    child.send_signal(number)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "interrupted" in stderr


@pytest.mark.parametrize("module", ["typer", "glm5deploy.cli.run"])
def test_an_interrupt_while_it_loads_ends_it_quietly(module: str, tmp_path: Path) -> None:
    """The interrupt comes when that module is looked for, long before any command's own boundary."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    answer = glm5deploy("status", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "")
