"""Ready means it answered, as seen against a real HTTP process and in every way that can go wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from glm5deploy.progress import Progress, ignore_progress
from glm5deploy.server.client import Client, RequestFailed
from glm5deploy.server.process import ServerExited, ServerProcess
from glm5deploy.server.readiness import NotReady, prove_answers, wait_for_health
from tests.support.serving import child_command, facts, free_port

REAL = facts(index_topk=64)
TEST = facts(index_topk=64, hidden_size=256)


@contextmanager
def server(tmp_path: Path, mode: str, key: str = "") -> Iterator[tuple[ServerProcess, int]]:
    port = free_port()
    secrets = {"VLLM_API_KEY": key} if key else None
    with ServerProcess(child_command(port, mode), tmp_path / "serve.log", secrets=secrets, grace=2) as process:
        yield process, port


def healthy(process: ServerProcess, client: Client, deadline: float = 20.0) -> float:
    return wait_for_health(client, deadline, process.check, ignore_progress, lambda: "last", poll=0.05)


def test_ready_after_three_answers(tmp_path: Path) -> None:
    with server(tmp_path, "serve") as (process, port), Client(f"http://127.0.0.1:{port}", "tiny") as client:
        healthy(process, client)
        results = prove_answers(client, REAL, context=4096, tools=True)
    assert [(result.name, result.outcome) for result in results] == [
        ("short prompt", "passed"),
        ("prompt beyond 64 tokens", "passed"),
        ("tool call", "passed"),
    ]
    assert results[0].note == "answered 42"
    tokens = int(results[1].note.split()[0])
    assert 72 < tokens <= 256
    assert results[1].note.endswith("answered cobalt-heron-71")


def test_nonsense_is_not_ready_for_a_real_model_and_not_judged_for_a_test_model(tmp_path: Path) -> None:
    with server(tmp_path, "wrong") as (process, port), Client(f"http://127.0.0.1:{port}", "tiny") as client:
        healthy(process, client)
        with pytest.raises(NotReady, match="short prompt: expected 42, got 'xyzzy'"):
            prove_answers(client, REAL, context=4096, tools=True)
        results = prove_answers(client, TEST, context=4096, tools=True)
    assert {result.outcome for result in results} == {"answered"}
    assert "random weights, the content is not judged" in results[2].note


def test_checks_that_cannot_be_made_say_why(tmp_path: Path) -> None:
    with server(tmp_path, "serve") as (process, port), Client(f"http://127.0.0.1:{port}", "tiny") as client:
        healthy(process, client)
        results = prove_answers(client, REAL, context=64, tools=False)
    assert [result.outcome for result in results] == ["passed", "skipped", "skipped"]
    assert results[1].note == "the context of 64 tokens leaves no room for it"
    assert results[2].note == "no tool parser is configured"


def test_a_foreign_server_is_not_ours(tmp_path: Path) -> None:
    with server(tmp_path, "serve") as (process, port), Client(f"http://127.0.0.1:{port}", "glm-5") as client:
        healthy(process, client)
        with pytest.raises(NotReady, match="offers tiny, not glm-5"):
            prove_answers(client, REAL, context=4096, tools=True)


def test_health_alone_is_not_ready(tmp_path: Path) -> None:
    with (
        server(tmp_path, "silent") as (process, port),
        Client(f"http://127.0.0.1:{port}", "tiny", timeout=0.5) as client,
    ):
        healthy(process, client)
        with pytest.raises(NotReady, match="short prompt: POST /v1/chat/completions: timed out"):
            prove_answers(client, REAL, context=4096, tools=True)


def test_progress_is_reported_until_the_server_is_up(tmp_path: Path) -> None:
    seen: list[Progress] = []
    with server(tmp_path, "slow") as (process, port), Client(f"http://127.0.0.1:{port}", "tiny") as client:
        seconds = wait_for_health(client, 20, process.check, seen.append, lambda: "loading", poll=0.05)
    assert seconds > 1.5
    assert {(progress.total, progress.note) for progress in seen} == {(20, "loading")}
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)


def test_waiting_ends_at_the_deadline(tmp_path: Path) -> None:
    begun = time.monotonic()
    with server(tmp_path, "hang") as (process, port), Client(f"http://127.0.0.1:{port}", "tiny") as client:
        with pytest.raises(NotReady, match="did not come up within 1 s; its log ends with: last"):
            healthy(process, client, deadline=1.0)
        members = process.members()
    assert members
    assert process.members() == []
    assert time.monotonic() - begun < 30


def test_waiting_ends_when_the_server_does(tmp_path: Path) -> None:
    with (
        server(tmp_path, "crash") as (process, port),
        Client(f"http://127.0.0.1:{port}", "tiny") as client,
        pytest.raises(ServerExited, match="KV cache is needed"),
    ):
        healthy(process, client)


def test_the_key_is_needed_and_used(tmp_path: Path) -> None:
    with server(tmp_path, "serve", key="s3cret") as (process, port):
        with Client(f"http://127.0.0.1:{port}", "tiny") as client:
            healthy(process, client)
            with pytest.raises(RequestFailed, match="status 401") as caught:
                client.chat([{"role": "user", "content": "hello"}])
            assert "--api-key-file" in str(caught.value.hint)
        with Client(f"http://127.0.0.1:{port}", "tiny", "s3cret") as client:
            assert client.chat([{"role": "user", "content": "hello"}]).content == "it is 42"
