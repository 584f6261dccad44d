"""A server's life: started in its own session, stopped whole, its death noticed and explained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError
from glm5deploy.server.guard import session_members
from glm5deploy.server.process import ServerExited, ServerProcess, rotate_logs
from tests.support.serving import child_command, free_port


def wait_for(condition: object, seconds: float = 10.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def started(tmp_path: Path, mode: str, grace: float = 5.0) -> ServerProcess:
    process = ServerProcess(child_command(free_port(), mode), tmp_path / "serve.log", grace=grace)
    wait_for(lambda: "worker" in process.log.read_text())
    return process


def test_stop_ends_server_and_worker_within_the_grace_period(tmp_path: Path) -> None:
    process = started(tmp_path, "serve", grace=60)
    assert len(process.members()) == 3  # guard, server, worker
    begun = time.monotonic()
    process.stop()
    assert process.members() == []
    assert time.monotonic() - begun < 30
    process.stop()


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path) -> None:
    process = started(tmp_path, "stubborn", grace=0.5)
    begun = time.monotonic()
    process.stop()
    assert process.members() == []
    assert 0.4 < time.monotonic() - begun < 30


def test_a_worker_left_behind_by_its_server_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "leave")
    wait_for(lambda: not process.running)
    assert process.members() == []
    with pytest.raises(ServerExited, match="exit status 3"):
        process.check()
    process.stop()


def test_an_early_end_shows_the_telling_line_and_where_the_log_is(tmp_path: Path) -> None:
    process = started(tmp_path, "crash")
    wait_for(lambda: not process.running)
    with pytest.raises(ServerExited) as caught:
        process.check()
    assert caught.value.message == (
        "the server ended with exit status 1\n  ValueError: KV cache is needed, which is larger than the available one"
    )
    assert caught.value.hint == (
        f"lower --context to what the message says fits, or give the cache more memory; the whole log is {process.log}"
    )
    process.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_parent_dies(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from glm5deploy.server.process import ServerProcess\n"
        "from tests.support.serving import child_command, free_port\n"
        "process = ServerProcess(child_command(free_port(), 'serve'), Path(sys.argv[1]), grace=2)\n"
        "print(process.session, flush=True); time.sleep(3600)"
    )
    log = tmp_path / "serve.log"
    parent = subprocess.Popen([sys.executable, "-c", script, str(log)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    session = int(parent.stdout.readline())
    wait_for(lambda: log.exists() and "worker" in log.read_text())
    assert len(session_members(session)) == 3
    parent.send_signal(number)
    parent.wait()
    wait_for(lambda: session_members(session) == [])


def test_nothing_is_left_when_the_guard_is_killed(tmp_path: Path) -> None:
    process = started(tmp_path, "serve")
    os.kill(process.session, signal.SIGKILL)
    wait_for(lambda: not process.running)
    process.stop()
    assert session_members(process.session) == []


def test_a_stopped_server_is_ended_as_well(tmp_path: Path) -> None:
    process = started(tmp_path, "serve", grace=0.5)
    for pid in process.members():
        if pid != process.session:
            os.kill(pid, signal.SIGSTOP)
    process.stop()
    assert process.members() == []


def test_secrets_reach_the_environment_and_no_command_line(tmp_path: Path) -> None:
    command = child_command(free_port(), "serve")
    with ServerProcess(command, tmp_path / "serve.log", secrets={"VLLM_API_KEY": "s3cret"}, grace=2) as process:
        wait_for(lambda: len(process.members()) == 3)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in process.members()]
        environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in process.members()]
    assert not any(b"s3cret" in line for line in lines)
    assert all(b"VLLM_API_KEY=s3cret" in environment for environment in environments)


def test_earlier_logs_are_kept_up_to_a_number(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "serve.log"
    for number in range(5):
        rotate_logs(log)
        log.write_text(str(number))
    assert {path.name: path.read_text() for path in log.parent.iterdir()} == {
        "serve.log": "4",
        "serve.log.1": "3",
        "serve.log.2": "2",
    }


def test_an_unwritable_log_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(DeployError, match="cannot write the server's log"):
        rotate_logs(tmp_path / "logs" / "serve.log")
