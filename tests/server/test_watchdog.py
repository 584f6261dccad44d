"""A server that gets nowhere is noticed, explained and started again, but not for ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5deploy.progress import ignore_progress
from glm5deploy.server.incident import KEPT, explain, public_lines, save_incident, stack_of
from glm5deploy.server.process import ServerExited
from glm5deploy.server.running import Places
from glm5deploy.server.session import serving
from glm5deploy.server.watchdog import Load, Restarts, Stalled, read_load
from tests.support.serving import child_command, facts, free_port, settings

REAL = facts(index_topk=64)
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="GLM-5"} 3.0
vllm:num_requests_running{engine="1",model_name="GLM-5"} 1.0
vllm:generation_tokens_total{engine="0",model_name="GLM-5"} 120.0
vllm:prompt_tokens_total{engine="0",model_name="GLM-5"} 7.5e+06
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="GLM-5"} 99.0
vllm:iteration_tokens_total_count{engine="0",model_name="GLM-5"} 130.0
vllm:kv_cache_usage_perc{engine="0",model_name="GLM-5"} 0.25
vllm:request_success_total{engine="0",finished_reason="stop",model_name="GLM-5"} 4.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="GLM-5"} 2.0
vllm:generation_tokens_total{engine="9"} broken
process_open_fds 12.0
"""


def test_the_load_is_summed_over_engines() -> None:
    assert read_load(METRICS) == Load(4, (120.0, 7.5e6, 130.0, 0.25, 6.0))
    assert read_load("") == Load(0, (0.0,) * 5)


def watch_child(tmp_path: Path, mode: str, stall: float, after: object = None) -> float:
    """Serve, watch, and return the seconds until it failed."""
    port = free_port()
    wanted = settings(port=port, stop_grace=2.0, stall_seconds=stall)
    places = Places.of(tmp_path)
    with serving(
        child_command(port, mode), wanted, REAL, places, None, ignore_progress, gpu_state=lambda: "two GPUs"
    ) as server:
        if callable(after):
            after(server.process)
        begun = time.monotonic()
        try:
            server.wait()
        finally:
            seconds = time.monotonic() - begun
    return seconds


def test_requests_that_run_without_a_token_are_a_stall(tmp_path: Path) -> None:
    with pytest.raises(Stalled, match="no progress for 1 s: 1 requests run and no counter moves") as caught:
        watch_child(tmp_path, "stall", 1.0)
    places = list((tmp_path / "logs" / "incidents").iterdir())
    assert str(places[0]) in caught.value.message
    assert {path.name for path in places[0].iterdir()} == {
        "gpus.txt",
        "kernel.txt",
        "log.txt",
        "reason.json",
        "stacks.txt",
    }
    assert (places[0] / "gpus.txt").read_text() == "two GPUs"
    stacks = (places[0] / "stacks.txt").read_text()
    assert stacks.count("process ") >= 2  # the server and its worker
    assert "http_child.py" in stacks


def test_a_stopped_process_is_a_stall(tmp_path: Path) -> None:
    def freeze(process: object) -> None:
        for pid in process.members():  # type: ignore[attr-defined]
            if pid != process.session:  # type: ignore[attr-defined]
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(Stalled, match="it answers nothing"):
        watch_child(tmp_path, "serve", 1.0, freeze)


@pytest.mark.parametrize("mode", ["busy", "serve"])
def test_progress_and_idleness_are_no_stall(tmp_path: Path, mode: str) -> None:
    """The server is ended after three times the limit: that, and no stall, is what is seen."""

    def end_later(process: object) -> None:
        pid = next(pid for pid in process.members() if pid != process.session)  # type: ignore[attr-defined]
        subprocess.Popen(["sh", "-c", f"sleep 2.4; kill -KILL {pid}"])

    with pytest.raises(ServerExited, match="exit status 137"):
        watch_child(tmp_path, mode, 0.8, end_later)


def test_nothing_of_a_prompt_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    secret = "my diagnosis is"
    log.write_text(
        f"INFO Received request chatcmpl-1: prompt: '{secret}'\n"
        f"ERROR NewRequestData(req_id=1,prompt_token_ids=[1, 2],x={secret})\n"
        f"DEBUG messages=[{{'content': '\u2028\x85{secret}'}}]\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB\n"
    )
    place = save_incident(tmp_path / "incidents", "it died", log, [], "no GPUs")
    for path in place.iterdir():
        assert secret not in path.read_text()
    assert explain(place)[0].startswith("GPU out of memory: torch.OutOfMemoryError")
    assert json.loads((place / "reason.json").read_text())["reason"] == "it died"
    assert public_lines(["INFO ready"]) == ["INFO ready"]


def test_only_the_last_incidents_are_kept(tmp_path: Path) -> None:
    places = [save_incident(tmp_path / "i", str(number), tmp_path / "none", [], "") for number in range(KEPT + 2)]
    assert sorted((tmp_path / "i").iterdir()) == places[2:]


def test_a_stack_without_values() -> None:
    script = "import time\ndef waiting(secret):\n    time.sleep(60)\nwaiting('s3' + 'cret-value')"
    child = subprocess.Popen([sys.executable, "-c", script])
    try:
        time.sleep(0.5)
        stack = stack_of(child.pid)
    finally:
        child.kill()
        child.wait()
    assert stack.startswith(f"process {child.pid}: {sys.executable} -c import time")
    assert "s3cret-value" not in stack
    assert stack_of(2**22 + 1).startswith(f"process {2**22 + 1}: \ngone")


def test_restarts_back_off_and_end() -> None:
    now = [0.0]
    restarts = Restarts(3, first_wait=5, longest_wait=12, steady=100, clock=lambda: now[0])
    assert not restarts.was_ready
    restarts.ready()
    assert restarts.was_ready
    assert [restarts.next_wait() for _ in range(4)] == [5, 10, 12, None]


def test_a_steady_server_begins_the_row_anew() -> None:
    now = [0.0]
    restarts = Restarts(2, first_wait=5, steady=100, clock=lambda: now[0])
    for seconds, wait in ((1, 5), (1, 10), (150, 5), (1, 10), (1, None)):
        restarts.ready()
        now[0] += seconds
        assert restarts.next_wait() == wait
    assert Restarts(0).next_wait() is None
