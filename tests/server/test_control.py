"""Servers seen from outside: stopped, followed, sent to the background, described for systemd and compose."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5deploy.errors import DeployError
from glm5deploy.server.detach import start_detached
from glm5deploy.server.follow import follow, last_lines
from glm5deploy.server.guard import session_members
from glm5deploy.server.running import Places
from glm5deploy.server.state import read_state
from glm5deploy.server.stop import stop_server
from glm5deploy.server.units import Deployment, compose_file, systemd_unit

SUPERVISOR = """
import signal, sys
from pathlib import Path
from glm5deploy.progress import ignore_progress
from glm5deploy.server.running import Places
from glm5deploy.server.session import serving
from tests.support.serving import child_command, facts, free_port, settings
signal.signal(signal.SIGTERM, signal.default_int_handler)
port = free_port()
wanted = settings(port=port, stop_grace=2.0)
with serving(child_command(port, "serve"), wanted, facts(index_topk=64), Places.of(Path(sys.argv[1])), None,
             ignore_progress) as server:
    print("ready", flush=True)
    server.wait()
"""


@pytest.fixture
def supervised(tmp_path: Path) -> Any:
    child = subprocess.Popen([sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.wait()


def test_stop_ends_supervisor_and_server(tmp_path: Path, supervised: Any) -> None:
    path = Places.of(tmp_path).state
    state = read_state(path)
    assert state is not None
    assert stop_server(path, 20.0) == state
    assert session_members(state.guard) == []
    assert not path.exists()
    assert stop_server(path, 20.0) is None


def test_a_supervisor_that_does_not_listen_is_killed_and_its_server_too(tmp_path: Path, supervised: Any) -> None:
    path = Places.of(tmp_path).state
    state = read_state(path)
    assert state is not None
    supervised.send_signal(signal.SIGSTOP)
    assert stop_server(path, 0.5) == state
    assert session_members(state.guard) == []


def test_a_server_whose_supervisor_was_killed_ends_and_is_forgotten(tmp_path: Path, supervised: Any) -> None:
    path = Places.of(tmp_path).state
    state = read_state(path)
    assert state is not None
    supervised.kill()
    supervised.wait()
    stop_server(path, 20.0)
    assert session_members(state.guard) == []
    assert not path.exists()


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with pytest.raises(DeployError, match="there is no log"):
        last_lines(log, 5)
    log.write_bytes(b"".join(b"%06d\n" % number for number in range(50_000)) + b"end \xff")
    lines, size = last_lines(log, 3)
    assert lines == ["049998\n", "049999\n", "end �"]
    assert size == log.stat().st_size
    assert last_lines(log, 0)[0] == []
    assert len(last_lines(log, 10**6)[0]) == 50_001


def test_followed_text_is_whole_wherever_a_block_ends(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    text = "x" + "é" * (100 << 10)
    log.write_text(text)
    pieces = follow(log, 0)
    seen = ""
    while len(seen) < len(text):
        seen += next(pieces)
    assert seen == text


def test_following_goes_on_in_a_log_that_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("old\n")
    pieces = follow(log, 4)
    with log.open("a") as file:
        file.write("more\n")
    assert next(pieces) == "more\n"
    with log.open("a") as file:
        file.write("last\n")
    log.rename(tmp_path / "serve.log.1")
    writer = threading.Timer(0.5, log.write_text, ["anew\n"])
    writer.start()
    assert [next(pieces), next(pieces)] == ["last\n", "anew\n"]
    writer.join()


def test_a_background_command_answers_with_its_object(tmp_path: Path) -> None:
    """Any command that prints an object will do: the waiting is the same."""
    seen: list[str] = []
    value = start_detached(["reset", "serve", "--workdir", str(tmp_path), "--json"], tmp_path, on_progress=seen.append)
    assert (value["stage"], value["was_recorded"]) == ("serve", False)


def test_a_background_command_that_fails_says_why_with_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as caught:
        start_detached(["serve", "--workdir", str(tmp_path), "--json"], tmp_path)
    assert "serve needs " in caught.value.message
    assert caught.value.exit_code == 1
    with pytest.raises(DeployError) as caught:
        start_detached(["serve", "--port", "99999999", "--workdir", str(tmp_path), "--json"], tmp_path)
    assert caught.value.exit_code in (1, 2)
    with pytest.raises(DeployError, match="No such option: --no-such-option") as caught:
        start_detached(["serve", "--no-such-option", "--json"], tmp_path)
    assert caught.value.exit_code == 2


DEPLOYMENT = Deployment(
    program="/opt/venv/bin/glm5deploy",
    arguments=("serve", "--tp", "8", "--workdir", "/data/glm 5", "--name", "50%$x", "--", "--seed", "7"),
    directory=Path("/home/op"),
    workdir=Path("/data/glm 5"),
    user="op",
    port=8000,
    gpus=8,
    stop_grace=20,
    weights=(Path("/data/glm 5/merged"), Path("/mnt/shards")),
)


def sections(unit: str) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in unit.splitlines():
        if line.startswith("["):
            current = found.setdefault(line, {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            current[key] = value
    return found


def test_the_unit_runs_the_command_as_it_was_typed() -> None:
    unit = sections(systemd_unit(DEPLOYMENT))
    service = unit["[Service]"]
    command = service["ExecStart"]
    assert command == ('/opt/venv/bin/glm5deploy serve --tp 8 --workdir "/data/glm 5" --name "50%%$$x" -- --seed 7')
    assert shlex.split(command.replace("%%", "%").replace("$$", "$")) == [DEPLOYMENT.program, *DEPLOYMENT.arguments]
    assert (service["User"], service["WorkingDirectory"], service["KillMode"]) == ("op", "/home/op", "mixed")
    assert float(service["TimeoutStopSec"]) > DEPLOYMENT.stop_grace
    assert "EnvironmentFile" not in service
    assert unit["[Install]"]["WantedBy"] == "multi-user.target"


def test_a_key_from_the_environment_is_read_from_a_file_by_systemd() -> None:
    from dataclasses import replace

    unit = systemd_unit(replace(DEPLOYMENT, key_variable=True))
    assert sections(unit)["[Service]"]["EnvironmentFile"] == "/etc/glm5deploy.env"


def test_the_compose_file_is_yaml_that_says_the_same(tmp_path: Path) -> None:
    document = yaml.safe_load(compose_file(DEPLOYMENT, tmp_path))
    service = document["services"]["glm5"]
    assert service["build"]["context"] == str(tmp_path)
    assert service["build"]["dockerfile_inline"].startswith("FROM vllm/vllm-openai:v0.33.0\nCOPY ")
    assert service["command"] == [
        *("serve", "--tp", "8", "--workdir", "/data/glm 5", "--name", "50%$$x"),
        *("--host", "0.0.0.0", "--", "--seed", "7"),
    ]
    assert service["volumes"] == ["/data/glm 5:/data/glm 5", "/mnt/shards:/mnt/shards:ro"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert service["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 8, "capabilities": ["gpu"]}
    ]
    assert service["ulimits"]["memlock"] == -1


def test_secrets_in_the_compose_file_are_names(tmp_path: Path) -> None:
    from dataclasses import replace

    with_file = yaml.safe_load(compose_file(replace(DEPLOYMENT, key_file=Path("key")), "glm5deploy==0.1.0"))
    service = with_file["services"]["glm5"]
    at = service["command"].index("--api-key-file")
    assert service["command"][at + 1] == "/run/secrets/glm5_api_key"
    assert at < service["command"].index("--")
    assert service["secrets"] == ["glm5_api_key"]
    assert with_file["secrets"] == {"glm5_api_key": {"file": "/home/op/key"}}
    from_variable = yaml.safe_load(compose_file(replace(DEPLOYMENT, key_variable=True), "glm5deploy==0.1.0"))
    caches = ["VLLM_CACHE_ROOT=/data/glm 5/cache/vllm", "TRITON_CACHE_DIR=/data/glm 5/cache/triton"]
    assert service["environment"] == caches
    assert from_variable["services"]["glm5"]["environment"] == [*caches, "GLM5DEPLOY_API_KEY"]


def test_the_command_line_prints_unit_compose_and_logs(tmp_path: Path) -> None:
    from tests.support.serving import write_model_folder

    write_model_folder(tmp_path / "model", weights=tmp_path / "w.gguf")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "serve.log").write_text("one\ntwo\nth\u2028ree\n")

    def glm5deploy(*words: str) -> str:
        command = [sys.executable, "-m", "glm5deploy", *words, "--workdir", str(tmp_path)]
        environment = {**os.environ, "GLM5DEPLOY_API_KEY": "s3cret-key"}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=60).stdout

    unit = glm5deploy("serve", "--print-unit", "--tp", "8")
    assert f"serve --tp 8 --workdir {tmp_path}\n" in unit
    compose = glm5deploy("serve", "--print-compose", "--tp", "8")
    assert yaml.safe_load(compose)["services"]["glm5"]["deploy"]["resources"]
    assert "s3cret-key" not in unit + compose
    assert glm5deploy("logs", "-n", "2") == "two\nthree\n"
    assert json.loads(glm5deploy("logs", "-n", "1", "--json"))["lines"] == ["th\u2028ree"]
    assert glm5deploy("stop") == f"no server runs from {tmp_path}\n"
