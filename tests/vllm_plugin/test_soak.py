"""What scripts/soak.py judges: requests of every kind, answers that moved, memory that grew."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest

from tests.support.streaming_server import NAME, Pace, StreamingServer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = ("soak_load", "soak_watch", "soak_verdict", "soak_server", "soak")


@pytest.fixture(scope="module")
def parts() -> Iterator[dict[str, ModuleType]]:
    """The script's modules, loaded as running it loads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(name) for name in NAMES}
        for name in NAMES:
            del sys.modules[name]


def test_requests_are_of_every_kind_and_fit(parts: dict[str, ModuleType]) -> None:
    drawer = parts["soak_load"].Drawer(3, 990, 4096)
    drawn = [drawer.draw() for _ in range(600)]
    assert {request.kind for request in drawn} == set(parts["soak_load"].KINDS)
    lengths = [len(request.prompt) for request in drawn]
    assert min(lengths) >= 1
    assert 3000 < max(lengths) <= 4096
    assert all(0 <= token < 990 for request in drawn for token in request.prompt)
    assert {request.stream for request in drawn if request.kind == "short"} == {True, False}
    prefixes = [tuple(request.prompt[:1000]) for request in drawn if request.kind == "prefix"]
    assert len(set(prefixes)) == 3


def test_tokens_that_look_like_line_ends_are_no_failure(parts: dict[str, ModuleType]) -> None:
    load = parts["soak_load"]
    tally = load.Tally()

    async def send(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            await load.send(http, NAME, load.Request("short", [1, 2], 4, True), tally)
            await load.send(http, NAME, load.Request("aborted", [1, 2], 4, True, abort_after=2), tally)

    with StreamingServer(Pace(first=0, between=0, text="\x85\u2028\u2029")) as server:
        asyncio.run(send(server.url))
    assert tally.tokens == 4


def canary(parts: dict[str, ModuleType], shift: float = 0.0, tokens: tuple[str, ...] = ("a", "b", "c")) -> Any:
    top = {str(i): -float(i) for i in range(20)}
    moved = {token: value + shift for token, value in top.items()}
    return parts["soak_watch"].Canary([moved] * 5, [top, moved, moved], [*tokens])


def test_a_moved_answer_is_measured(parts: dict[str, ModuleType]) -> None:
    seen = parts["soak_watch"].Deviations()
    parts["soak_watch"].compare_canary(canary(parts), canary(parts, 0.5), seen)
    assert seen.prompted == [0.5]
    assert seen.decoded == [0.5]
    # After the first token that differs nothing can be compared; that step itself was.
    parts["soak_watch"].compare_canary(canary(parts), canary(parts, 0.5, ("x", "b", "c")), seen)
    assert seen.decoded == [0.5, 0.0]


def test_a_token_that_went_missing_counts_as_the_last_listed(parts: dict[str, ModuleType]) -> None:
    assert parts["soak_watch"].difference([{"a": -1.0, "b": -2.0, "c": -9.0}], [{"x": -0.5, "y": -4.0}]) == 3.0


def test_a_server_that_has_ended_is_noticed(parts: dict[str, ModuleType]) -> None:
    """Its own child, too, which nobody has waited for and which psutil therefore still finds."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # until then it may hold no memory of its own
    memory = parts["soak_watch"].Memory(psutil.Process(child.pid))
    memory.sample()
    assert memory.samples[0].rss > 1
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(psutil.NoSuchProcess):
        memory.sample()
    child.communicate()


def test_figures_so_far_are_written(parts: dict[str, ModuleType], tmp_path: Path) -> None:
    tally, seen = parts["soak_load"].Tally(tokens=500), parts["soak_watch"].Deviations(prompted=[0.1], decoded=[0.2])
    tally.failures.append("short: status 500")
    memory, now = parts["soak_watch"].Memory(psutil.Process()), time.monotonic()
    memory.sample()
    asyncio.run(parts["soak"].progress(tmp_path / "f.json", tally, seen, memory, now - 100, now + 2))
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["unfinished"]
    assert figures["tokens/s"] == pytest.approx(5, rel=0.2)
    assert figures["failures"] == ["short: status 500"]


FIGURES: dict[str, Any] = {
    "requests": dict.fromkeys(("short", "medium", "long", "prefix", "one token", "several", "aborted"), 1),
    "rss": {"start": 100.0, "settled": 900.0, "mid": 950.0, "end": 1000.0},
    "gpu": {"start": None, "settled": None, "mid": None, "end": None},
    "prompted": 0.01,
    "decoded": 0.2,
    "all decoded": 0.02,
    "compiled": 0,
    "preemptions": 3.0,
}
LIMITS = argparse.Namespace(rss_growth=256.0, gpu_growth=64.0, preemptions=3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"prompted": math.nan}, "prompted is nan"),
        ({"decoded": 1.5}, "decoded is 1.5"),
        ({"compiled": 1}, "compiled is 1"),
        ({"preemptions": 2.0}, "2 preemptions, 3 needed"),
        ({"rss": {**FIGURES["rss"], "end": 1200.0}}, "rss grew by 300 MiB"),
        ({"gpu": {"start": 0.0, "settled": 10.0, "mid": 10.0, "end": 100.0}}, "gpu grew by 90 MiB"),
        ({"requests": {"short": 5}}, "no request of these kinds"),
    ],
)
def test_what_is_wrong_is_named(parts: dict[str, ModuleType], change: dict[str, Any], words: str | None) -> None:
    found = parts["soak"].judge({**FIGURES, **change}, LIMITS)
    assert (found == []) if words is None else (len(found) == 1 and words in found[0]), found
