"""From start to stop: ready with evidence, or not ready with what was seen, and never anything left over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glm5deploy.checks import Check
from glm5deploy.errors import DeployError
from glm5deploy.progress import ignore_progress
from glm5deploy.server.api_key import ApiKey
from glm5deploy.server.evidence import IndexerCount, read_indexer_counts, read_running
from glm5deploy.server.guard import session_members
from glm5deploy.server.leftover import wait_for_leftover
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.process import ServerExited
from glm5deploy.server.readiness import NotReady
from glm5deploy.server.running import Places
from glm5deploy.server.session import serving
from glm5deploy.server.settings import ServeSettings
from glm5deploy.server.state import ServerState, read_state, start_time, write_state
from tests.support.serving import child_command, facts, free_port, settings

REAL = facts(index_topk=64)


def run(tmp_path: Path, mode: str, model: ModelFacts = REAL, key: ApiKey | None = None, **changes: object) -> Places:
    """Start, prove, look around, stop; returns the places."""
    places = Places.of(tmp_path)
    port = free_port()
    wanted: ServeSettings = settings(port=port, stop_grace=2.0, ready_timeout=20.0, **changes)
    with serving(child_command(port, mode), wanted, model, places, key, ignore_progress) as server:
        state = read_state(places.state)
        assert state is not None
        assert (state.phase, state.url, state.supervisor) == ("ready", wanted.base_url, os.getpid())
        assert state.alive
        assert state.supervised
        assert server.report.context == 4096
        assert server.report.indexer.sparse_rows == 5
        assert server.report.summary.startswith("GLM5_TRITON_SPARSE, KV cache auto, indexer ran ")
        assert "short prompt: passed, prompt beyond 64 tokens: passed, tool call: passed" in server.report.summary
        with server.client() as client:
            assert client.chat([{"role": "user", "content": "hi"}]).content == "it is 42"
    assert session_members(state.guard) == []
    assert read_state(places.state) is None
    return places


def test_a_server_from_start_to_stop(tmp_path: Path) -> None:
    run(tmp_path, "serve")


def test_the_key_is_used_and_left_nowhere(tmp_path: Path) -> None:
    places = run(tmp_path, "serve", key=ApiKey("s3cret-key", "file /key"))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"s3cret-key" not in path.read_bytes()
    assert places.log.exists()


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        ("dense", {}, "none was cut to 64 positions"),
        ("uncounted", {}, "the indexer ran on 0 of 1 ranks: attention is not sparse"),
        ("serve", {"tp": 2}, "the indexer ran on 1 of 2 ranks"),
        ("serve", {"pp": 2}, "the indexer ran on 1 of 2 ranks"),
        ("wrong", {}, "short prompt: expected 42"),
    ],
)
def test_not_ready(tmp_path: Path, mode: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(NotReady, match=message) as caught:
        run(tmp_path, mode, **changes)
    assert caught.value.hint
    assert read_state(Places.of(tmp_path).state) is None


def test_an_engine_that_dies_when_asked_is_told_by_its_log(tmp_path: Path) -> None:
    with pytest.raises(ServerExited, match="RuntimeError: CUDA out of memory"):
        run(tmp_path, "dies")


def test_native_attention_is_not_counted(tmp_path: Path) -> None:
    port = free_port()
    wanted = settings(port=port, attention="native", stop_grace=2.0)
    with serving(child_command(port, "uncounted"), wanted, REAL, Places.of(tmp_path), None, ignore_progress) as server:
        assert "indexer calls are not counted on this backend" in server.report.summary


def test_without_a_tool_parser_no_tool_call_is_asked_for(tmp_path: Path) -> None:
    port = free_port()
    wanted = settings(port=port, stop_grace=2.0)
    with serving(child_command(port, "toolless"), wanted, REAL, Places.of(tmp_path), None, ignore_progress) as server:
        assert [check.outcome for check in server.report.checks] == ["passed", "passed", "skipped"]


def test_counters_of_an_earlier_server_do_not_count(tmp_path: Path) -> None:
    places = Places.of(tmp_path)
    places.counters.mkdir(parents=True)
    (places.counters / "indexer-rank0.json").write_text('{"calls": 9, "rows": 9, "sparse_rows": 9, "layers": [0]}')
    with pytest.raises(NotReady, match="0 of 1 ranks"):
        run(tmp_path, "uncounted")


def test_counters_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "indexer-rank0.json").write_text('{"calls": 9, "rows": 8, "sparse_rows": 7, "layers": [2, 0]}')
    (tmp_path / "indexer-rank1.json").write_text('{"calls": 9, "rows": 8, "sparse_rows": 0, "layers": [0]}')
    (tmp_path / "indexer-rank2.json").write_text("{")
    (tmp_path / "indexer-rank3.json").write_text('{"calls": "9", "rows": 8, "sparse_rows": 7, "layers": []}')
    assert read_indexer_counts(tmp_path) == IndexerCount(2, 18, 8, 0, (0, 2))


def test_what_the_log_says_of_the_engine() -> None:
    running = read_running(
        [
            "INFO 11-29 [core.py:112] Initializing a V1 LLM engine (v0.32.0) with config: dtype=torch.bfloat16,"
            " max_seq_len=202752, load_format=glm5_gguf, kv_cache_dtype=auto, device_config=cpu",
            "INFO 11-29 [cuda.py:1] Using GLM5_TRITON_SPARSE attention backend out of potential backends: ['X']",
            "INFO 11-29 [kv_cache_utils.py:1] GPU KV cache size: 1,234,567 tokens, Maximum concurrency",
        ]
    )
    assert (running.backend, running.kv_dtype, running.kv_tokens) == ("GLM5_TRITON_SPARSE", "bfloat16", 1234567)
    assert read_running(["kv_cache_dtype=fp8_ds_mla, dtype=torch.bfloat16"]).kv_dtype == "fp8_ds_mla"


def state_of(pid: int, **changes: object) -> ServerState:
    values = {
        "phase": "ready",
        "supervisor": pid,
        "supervisor_started": start_time(pid),
        "guard": pid,
        "guard_started": start_time(pid),
        "url": "http://127.0.0.1:1",
        "name": "tiny",
        "log": "/log",
        **changes,
    }
    return ServerState(**values)  # type: ignore[arg-type]


def test_a_used_again_process_id_is_not_our_server(tmp_path: Path) -> None:
    assert state_of(os.getpid()).alive
    assert not state_of(os.getpid(), guard_started=1.0).alive
    assert not state_of(2**22 + 1).alive


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"phase": "ready", "guard": 1}', "\0", '{"phase": []}'])
def test_a_damaged_record_is_no_record(tmp_path: Path, content: str) -> None:
    (tmp_path / "server.json").write_text(content)
    assert read_state(tmp_path / "server.json") is None
    assert read_state(tmp_path / "missing.json") is None


def test_a_record_round_trips(tmp_path: Path) -> None:
    state = state_of(os.getpid(), key_source="file /key")
    write_state(tmp_path / "deep" / "server.json", state)
    assert read_state(tmp_path / "deep" / "server.json") == state


def test_a_leftover_is_waited_for_and_a_supervised_server_refused(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    wait_for_leftover(path, 1.0)
    write_state(path, state_of(os.getpid(), guard_started=1.0))
    wait_for_leftover(path, 1.0)
    assert not path.exists()
    write_state(path, state_of(os.getpid()))
    with pytest.raises(DeployError, match="is running at http") as caught:
        wait_for_leftover(path, 1.0)
    assert caught.value.hint == "glm5deploy stop"


def test_a_check_says_ok_without_a_remedy() -> None:
    assert Check("a", "ok", "b").remedy == ""
