"""The serve stage on set A: what it plans, what it refuses, and (marked ``engine``) what it serves."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from glm5deploy.cli.app import app
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.pipeline.events import Event
from glm5deploy.pipeline.stage import Blocked
from glm5deploy.pipeline.state import Record, State
from glm5deploy.progress import ignore_progress
from glm5deploy.server.command import build_command
from glm5deploy.server.guard import session_members
from glm5deploy.server.process import ServerExited
from glm5deploy.server.readiness import WEATHER_TOOL
from glm5deploy.server.running import Places
from glm5deploy.server.session import serving
from glm5deploy.server.state import read_state
from glm5deploy.stages import engine_check
from glm5deploy.stages.engine_check import require_meaning
from glm5deploy.stages.serve import ServerInfo, ServeStage
from glm5deploy.stages.serve_plan import make_plan, ready_timeout, served_name
from tests.stages.serving import serve_context
from tests.support.serving import facts, free_port, settings


def record_earlier_stages(workdir: Path) -> None:
    """The work folder as patch and install leave it."""
    state = State(workdir, lambda message: pytest.fail(message))
    for name, outputs in serve_context(workdir, {}).outputs.items():
        state.write(name, Record({}, outputs, "2026-01-01T00:00:00+00:00", 1.0, "0"))


@pytest.mark.slow
def test_a_dry_run_shows_a_command_that_vllm_understands_and_changes_nothing(tmp_path: Path) -> None:
    record_earlier_stages(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    port = free_port()
    words = ["serve", "--dry-run", "--json", "--workdir", str(tmp_path), "--port", str(port), "--name", "my-glm"]
    words += ["--context", "4096", "--max-seqs", "4", "--reasoning-parser", "none", "--dtype", "float32"]
    result = CliRunner().invoke(app, [*words, "--", "--seed", "7"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)["serve"]
    command = shlex.split(plan["command"])
    assert command[command.index("--model") :] == [
        *("--model", str(tmp_path / "model")),
        *("--load-format", "glm5_gguf"),
        *("--served-model-name", "my-glm"),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
        *("--tensor-parallel-size", "1"),
        *("--dtype", "float32"),
        *("--kv-cache-dtype", "auto"),
        *("--max-model-len", "4096"),
        *("--attention-backend", "GLM5_TRITON_SPARSE"),
        *("--max-num-seqs", "4"),
        *("--tool-call-parser", "glm47"),
        "--enable-auto-tool-choice",
        "--enforce-eager",
        *("--compilation-config", '{"custom_ops": ["none"]}'),
        *("--seed", "7"),
    ]
    assert {check["level"] for check in plan["checks"]} <= {"ok", "warn"}
    assert plan["checks"][-1]["check"] == "arguments"
    assert (plan["status"], plan["api_key"]) == ("to do", "none")
    assert sorted(path for path in tmp_path.rglob("*")) == before


PARALLEL = 200
MEANT = {
    "host": "127.0.0.1",
    "port": 8000,
    "uds": None,
    "served_model_name": ["tiny"],
    "tensor_parallel_size": 1,
    "load_format": "glm5_gguf",
    "trust_remote_code": False,
    "api_key": None,
}


@pytest.mark.parametrize(
    ("understood", "message"),
    [
        ({"trust_remote_code": True}, "change trust_remote_code to True"),
        ({"host": "0.0.0.0"}, "change host to '0.0.0.0'"),
        ({"served_model_name": ["tiny2"]}, "change served model name to 'tiny2'"),
        ({"api_key": ["s3cret"]}, "change api_key to another one"),
        ({"load_format": "auto"}, "change load format to 'auto'"),
    ],
)
def test_an_abbreviated_flag_cannot_undo_a_promise(understood: dict[str, object], message: str) -> None:
    require_meaning(MEANT, settings())
    with pytest.raises(UsageError, match=message):
        require_meaning({**MEANT, **understood}, settings())


def test_the_answer_is_remembered_for_the_same_question(tmp_path: Path) -> None:
    """A kept refusal is repeated, and a kept answer that is no longer true for these arguments is not used."""
    command = build_command(settings(), facts(), launcher=("vllm", "serve"))
    versions = engine_check.installed_versions()
    key = sha256(json.dumps([list(command.vllm_arguments), versions], sort_keys=True).encode()).hexdigest()
    memo = tmp_path / "memo.json"
    memo.write_text(json.dumps({"key": key, "report": {"ok": False, "error": "no such flag"}}))
    with pytest.raises(UsageError, match="vLLM refuses the command: no such flag"):
        engine_check.check_vllm_arguments(command, settings(), memo, remember=True)
    memo.write_text(json.dumps({"key": key, "report": {"ok": True, "values": MEANT}}))
    assert engine_check.check_vllm_arguments(command, settings(), memo, remember=True).level == "ok"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"serve.tp": 3}, "tensor-parallel size 3 does not divide"),
        ({"serve.tp": 2, "serve.weights": "quantised"}, "would cut quantisation blocks"),
        ({"serve.context": 202753}, "at most 202752 tokens"),
        ({"serve.extra": ("--api-key", "x")}, "--api-key cannot be given after --"),
    ],
)
def test_what_cannot_work_is_wrong_usage(tmp_path: Path, flags: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ServeStage().run(serve_context(tmp_path, flags))
    assert (caught.value.exit_code, bool(caught.value.hint)) == (2, "context" not in str(flags))


def test_a_port_in_use_fails_before_vllm_is_asked(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = os.times()
        with pytest.raises(DeployError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            ServeStage().run(serve_context(tmp_path, {"serve.port": port}))
    after = os.times()
    assert after.children_user - before.children_user < 1.0, "importing vLLM takes more than that"
    assert (caught.value.exit_code, caught.value.hint) == (1, f"stop that, or --port {port + 1}")


def test_an_unwritable_log_fails(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    with pytest.raises(DeployError, match="no log at"):
        ServeStage().run(serve_context(tmp_path, {"serve.port": free_port()}))


def test_missing_vllm_names_the_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "installed_versions", dict)
    with pytest.raises(DeployError, match="vLLM is not installed") as caught:
        ServeStage().run(serve_context(tmp_path, {"serve.port": free_port()}))
    assert "scripts/setup.sh" in str(caught.value.hint)


def test_a_missing_shard_fails(tmp_path: Path) -> None:
    context = serve_context(tmp_path, {})
    pointer = tmp_path / "model" / "glm5_gguf.json"
    value = json.loads(pointer.read_text())
    pointer.write_text(json.dumps({**value, "files": [*value["files"][:-1], "/nowhere/shard.gguf"]}))
    with pytest.raises(DeployError, match=r"/nowhere/shard\.gguf is missing"):
        ServeStage().run(context)


def test_earlier_stages_come_first(tmp_path: Path) -> None:
    context = serve_context(tmp_path, {})
    with pytest.raises(Blocked, match="install"):
        ServeStage().inputs(replace(context, outputs={"patch": context.outputs["patch"]}))
    with pytest.raises(Blocked, match="patch"):
        ServeStage().inputs(replace(context, outputs={"install": context.outputs["install"]}))
    assert ServeStage().stale_outputs(context, {})


def test_the_time_to_load_follows_the_bytes_and_the_disk(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    with weights.open("wb") as file:
        file.truncate(1 << 30)
    assert ready_timeout(facts(weight_files=((weights, 1 << 30),))) == 600
    seconds = ready_timeout(facts(weight_files=((weights, 430 * 10**9),)))
    assert 600 + 2 * 430e9 / 1e11 < seconds <= 600 + 2 * 430e9 / 50e6


@pytest.mark.parametrize(
    ("repo", "name"),
    [
        ("unsloth/GLM-5.2-GGUF", "GLM-5.2"),
        ("a/GLM-5.1.gguf", "GLM-5.1"),
        ("", "glm-5"),
        ("x/-GGUF", "glm-5"),
        ("demo/GLM-tiny", "GLM-tiny"),
    ],
)
def test_served_names(repo: str, name: str) -> None:
    assert served_name(repo) == name


def engine_of(server: ServerInfo) -> psutil.Process:
    members = psutil.Process(server.process.session).children(recursive=True)
    return next(process for process in members if "EngineCore" in process.name())


@pytest.mark.engine
@pytest.mark.slow
def test_serving_to_the_openai_client(tmp_path: Path) -> None:
    """An engine that hangs is noticed, explained and started again; then the API as people use it, a client that hangs
    up, many requests at once; then an engine that dies, with no restart left."""
    import openai

    key = tmp_path / "key"
    key.write_text("s3cret-key\n")
    key.chmod(0o600)
    flags = {
        "serve.port": free_port(),
        "serve.dtype": "float32",
        "serve.context": 2048,
        "serve.api_key_file": key,
        "serve.stall_seconds": 8.0,
        "serve.restarts": 1,
    }
    seen: list[Event] = []
    sessions: list[int] = []
    question: Any = [{"role": "user", "content": "Tell me about lighthouses."}]

    def use(server: ServerInfo) -> None:
        sessions.append(server.process.session)
        report = server.report
        assert (report.backend, report.kv_dtype, report.context) == ("GLM5_TRITON_SPARSE", "float32", 2048)
        assert report.indexer.sparse_rows > 0
        assert report.indexer.layers == (0, 1, 2, 3)
        assert [check.outcome for check in report.checks] == ["answered"] * 3
        url = f"{server.base_url}/v1"
        client = openai.OpenAI(base_url=url, api_key="s3cret-key", max_retries=0, timeout=120)
        running = client.chat.completions.create(
            model="GLM-tiny-A", messages=question, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(running))
        if len(sessions) == 1:
            engine_of(server).send_signal(signal.SIGSTOP)
            server.wait()
        running.close()
        converse(client, url)
        engine_of(server).send_signal(signal.SIGKILL)
        server.wait()

    def converse(client: openai.OpenAI, url: str) -> None:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
        whole = client.chat.completions.create(model="GLM-tiny-A", messages=question, max_tokens=12, temperature=0)
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 12
        pieces = client.chat.completions.create(
            model="GLM-tiny-A", messages=question, max_tokens=12, temperature=0, stream=True
        )
        deltas: list[Any] = [piece.choices[0].delta for piece in pieces if piece.choices]
        streamed = "".join((delta.content or "") + (getattr(delta, "reasoning", None) or "") for delta in deltas)
        message: Any = whole.choices[0].message
        assert message.reasoning
        assert not message.content  # a random model never closes its thinking
        quiet: Any = {"chat_template_kwargs": {"enable_thinking": False}}
        plain = client.chat.completions.create(
            model="GLM-tiny-A", messages=question, max_tokens=12, temperature=0, extra_body=quiet
        )
        assert plain.choices[0].message.content
        named: Any = {"type": "function", "function": {"name": "get_weather"}}
        tools: Any = [WEATHER_TOOL]
        called = client.chat.completions.create(
            model="GLM-tiny-A",
            messages=question,
            tools=tools,
            tool_choice=named,
            max_tokens=40,
            temperature=0,
            extra_body=quiet,
        )
        call: Any = (called.choices[0].message.tool_calls or [None])[0]
        assert call.function.name == "get_weather"  # the grammar makes even random weights call it
        assert streamed == (message.content or "") + (getattr(message, "reasoning", None) or "")
        done: list[int] = []

        def ask() -> None:
            answer = client.chat.completions.create(model="GLM-tiny-A", messages=question, max_tokens=2)
            done.append(answer.usage.completion_tokens if answer.usage else 0)

        threads = [threading.Thread(target=ask) for _ in range(PARALLEL)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [2] * PARALLEL

    with pytest.raises(ServerExited, match="ended with exit status") as caught:
        ServeStage(on_ready=use).run(serve_context(tmp_path, flags, seen))
    assert len(sessions) == 2
    assert [session_members(session) for session in sessions] == [[], []]
    assert "saved in" in caught.value.message
    told = [event.message for event in seen if event.kind == "warning"]
    assert any("no progress for 8 s" in message and "starting again in 5 s" in message for message in told), told
    hung, died = sorted((tmp_path / "logs" / "incidents").iterdir())
    assert "no progress" in json.loads((hung / "reason.json").read_text())["reason"]
    assert "EngineCore" in (hung / "stacks.txt").read_text()
    assert "exit status" in json.loads((died / "reason.json").read_text())["reason"]
    ready = [event for event in seen if event.message.startswith("READY")]
    assert [event.data["url"] for event in ready] == [f"http://127.0.0.1:{flags['serve.port']}/v1"] * 2
    for path in tmp_path.rglob("*"):
        if path != key and path.is_file():
            content = path.read_bytes()
            assert b"s3cret-key" not in content
            assert b"lighthouse" not in content


@pytest.mark.engine
@pytest.mark.slow
def test_too_little_memory_is_named_with_a_remedy(tmp_path: Path) -> None:
    """The real engine under a limit that it cannot even be imported with."""
    context = serve_context(tmp_path, {"serve.port": free_port()})
    plan = make_plan(tmp_path, tmp_path / "model", context.config, context.outputs["install"], {})
    limited = replace(plan.command, argv=("prlimit", "--as=1200000000", *plan.command.argv))
    with (
        pytest.raises(ServerExited, match="MemoryError") as caught,
        serving(limited, plan.settings, plan.model, Places.of(tmp_path), None, ignore_progress),
    ):
        pytest.fail("it must not get ready")
    assert str(caught.value.hint).startswith("free host memory or raise the memory limit")


@pytest.mark.engine
@pytest.mark.slow
def test_two_ranks_in_the_background_until_stopped(tmp_path: Path) -> None:
    """The commands as an operator types them: serve --detach, logs, status, stop."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.fail("tensor parallelism 2 needs two cores")
    record_earlier_stages(tmp_path)

    def glm5deploy(*words: str) -> subprocess.CompletedProcess[str]:
        at = words.index("--") if "--" in words else len(words)
        line = [*words[:at], "--workdir", str(tmp_path), *words[at:]]
        command = [sys.executable, "-m", "glm5deploy", *line]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    port = free_port()
    begun = ["serve", "--tp", "2", "--port", str(port), "--context", "1024", "--detach", "--json", "--", "--seed", "3"]
    started = glm5deploy(*begun)
    assert started.returncode == 0, started.stdout + started.stderr
    value = json.loads(started.stdout)
    try:
        assert value["url"] == f"http://127.0.0.1:{port}/v1"
        assert value["report"]["indexer"]["ranks"] == 2
        kept = read_state(tmp_path / ".glm5deploy" / "server.json")
        assert kept is not None
        assert (kept.phase, kept.supervisor, kept.supervised) == ("ready", value["supervisor"], True)
        assert len(session_members(kept.guard)) >= 5  # guard, API server, engine, two workers
        again = glm5deploy("serve", "--port", str(free_port()), "--json")
        assert again.returncode == 1
        assert "is in use by process" in json.loads(again.stdout)["error"]["message"]
        assert glm5deploy("logs", "-n", "5").stdout.count("\n") == 5
    finally:
        stopped = glm5deploy("stop", "--json")
    assert json.loads(stopped.stdout) == {"stopped": True, "url": f"http://127.0.0.1:{port}"}
    assert session_members(kept.guard) == []
    assert not (tmp_path / ".glm5deploy" / "server.json").exists()
