"""What only a process of its own can show: SIGKILL at any moment, and memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub.conftest import QUANT, REPO
from tests.support.data import REPOSITORY
from tests.support.faulty_hub import FaultyHub
from tests.support.shard_sets import write_set

MEGABYTE = 1_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.fixture
def server() -> Iterator[FaultyHub]:
    with FaultyHub() as server:
        yield server


def child(server: FaultyHub, destination: Path, **options: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.support.fetch_child", server.endpoint, REPO, QUANT, str(destination)]
    return subprocess.Popen(
        [*command, json.dumps(options)], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_sigkill_at_random_points_costs_next_to_nothing(server: FaultyHub, source: Path, tmp_path: Path) -> None:
    paths = write_set(source / QUANT, "m", [9 * MEGABYTE, 16 * MEGABYTE, 7 * MEGABYTE])
    server.publish(REPO, source)
    server.pace = 20 * MEGABYTE
    size = sum(path.stat().st_size for path in paths)
    chooser = random.Random(7)
    targets = sorted(chooser.randrange(MEGABYTE, size - MEGABYTE) for _ in range(5))
    kills = 0
    for target in targets:
        server.most = target + 2 * MEGABYTE  # bytes flow when the signal comes, and end before the set does
        with child(server, tmp_path / "work") as process:
            while server.served["bytes"] < target and process.poll() is None:
                time.sleep(0.005)
            process.kill()
            kills += process.wait() == -9
        server.most = None
        server.wait_idle()
    server.pace = 0
    with child(server, tmp_path / "work") as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [Path(p).read_bytes() for p in json.loads(output)["paths"]] == [p.read_bytes() for p in paths]
    assert kills == len(targets)
    # In flight when killed, a connection: what the server's buffer, the client's and one slice hold.
    unflushed = kills * 3 * 512 * 1024
    assert server.served["bytes"] <= size * 1.01 + unflushed
    assert not list((tmp_path / "work").rglob("*.partial*"))


def test_64_ranges_at_once_stay_within_300_megabytes(server: FaultyHub, source: Path, tmp_path: Path) -> None:
    paths = write_set(source / QUANT, "m", [2 * MEGABYTE] * 64)
    server.publish(REPO, source)
    server.pace = 2 * MEGABYTE
    with child(server, tmp_path / "work", parallel=64) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    result = json.loads(output)
    assert [Path(p).read_bytes() for p in result["paths"]] == [p.read_bytes() for p in paths]
    assert result["peak"] < 300 * MEGABYTE
    # The transfers themselves: buffers of 64 connections, not 64 shards.
    assert result["peak"] - result["before"] < 150 * MEGABYTE


def test_an_interrupt_ends_a_waiting_fetch_at_once(server: FaultyHub, source: Path, tmp_path: Path) -> None:
    import signal

    from tests.support.faulty_hub import stall

    write_set(source / QUANT, "m", [3 * MEGABYTE])
    server.publish(REPO, source)
    server.inject(stall(MEGABYTE))
    with child(server, tmp_path / "work", stall_seconds=60) as process:
        while server.served["bytes"] < MEGABYTE:
            time.sleep(0.01)
        time.sleep(1.0)  # sent is not yet received
        process.send_signal(signal.SIGINT)
        process.wait(30)  # half of the time after which it would give the silent hub up
    partial = next((tmp_path / "work").rglob("*.partial"))
    assert partial.stat().st_size == MEGABYTE
