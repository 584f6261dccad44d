"""SIGKILL at every stage event in turn, then the same command again: the same bytes, the same answer.

The merge's own kill tests cover every journal step, and fetch's every byte range; here it is the whole line.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from glm5deploy.demo.local_hub import LocalHub
from tests.support.cli import glm5deploy, killed_at, serving
from tests.support.data import SET_A
from tests.support.goldens import prompts, references
from tests.support.serving import free_port

REPO = "tiny/GLM-tiny-A-GGUF"
MODEL = f"{REPO}:UD-Q4_K_XL"


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        hub.publish(REPO, SET_A / "GLM-tiny-A-GGUF")
        yield hub


@pytest.fixture(scope="module")
def undisturbed(hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder in which every stage before serve succeeded without interruption."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "work"
    done = glm5deploy("run", MODEL, "--until", "install", "--workdir", workdir, env={"HF_ENDPOINT": hub.endpoint})
    assert done.returncode == 0, done.stderr
    return workdir


def sums(workdir: Path) -> dict[str, str]:
    """sha256 of everything a later stage reads; paths inside the model folder are made relative first."""
    found = {}
    for part in ("shards", "merged", "model"):
        for path in sorted((workdir / part).rglob("*")):
            if path.is_file() and not any(p.startswith(".") for p in path.relative_to(workdir).parts):
                data = path.read_bytes().replace(str(workdir).encode(), b"")
                found[str(path.relative_to(workdir))] = hashlib.sha256(data).hexdigest()
    return found


def test_fetch_and_merge_survive_a_kill_at_every_event(hub: LocalHub, undisturbed: Path, tmp_path: Path) -> None:
    """Each kill in a fresh folder, so that nothing but what the killed process left is there."""
    expected = {name: value for name, value in sums(undisturbed).items() if not name.startswith("model/")}
    environment = {"HF_ENDPOINT": hub.endpoint}
    log = tmp_path / "events"
    seen: list[str] = []
    for number in range(200):
        workdir = tmp_path / str(number)
        command = ("run", MODEL, "--until", "merge", "--workdir", workdir)
        log.write_text("")
        killed = killed_at(number, log, *command, env=environment)
        seen = log.read_text().splitlines()
        if not killed:
            break
        done = glm5deploy(*command, env=environment)
        assert done.returncode == 0, f"after {seen[-1]}: {done.stderr}"
        assert sums(workdir) == expected, f"after {seen[-1]}"
        shutil.rmtree(workdir)
    assert {event.split()[0] for event in seen} == {"fetch", "merge"}
    assert sum(" checkpoint " in event for event in seen) >= 4 + 2


@pytest.mark.slow
def test_patch_and_install_survive_a_kill_at_every_event(hub: LocalHub, undisturbed: Path, tmp_path: Path) -> None:
    """Each kill in the folder that the kill before it left: every run goes on from a killed one."""
    workdir, log = tmp_path / "work", tmp_path / "events"
    command = ("run", MODEL, "--until", "install", "--workdir", workdir)
    environment = {"HF_ENDPOINT": hub.endpoint}
    died_at: list[str] = []
    for stage in ("patch", "install"):
        for number in range(20):
            done = glm5deploy("run", MODEL, "--until", previous(stage), "--workdir", workdir, env=environment)
            assert done.returncode == 0, done.stderr
            log.write_text("")
            killed_at(UP_TO_DATE[stage] + number, log, *command, env=environment)
            last = log.read_text().splitlines()[-1]
            died_at.append(last)
            if last.startswith(f"{stage} finished"):
                break
    assert [event.split()[:2] for event in died_at] == [
        ["patch", "started"],
        ["patch", "note"],
        ["patch", "checkpoint"],
        ["patch", "finished"],
        ["install", "started"],
        ["install", "note"],
        ["install", "finished"],
    ]
    done = glm5deploy(*command, env=environment)
    assert done.returncode == 0, done.stderr
    assert sums(workdir) == sums(undisturbed)


UP_TO_DATE = {"patch": 2, "install": 3}
"""Events of the stages before, each of which only says that it is up to date."""


def previous(stage: str) -> str:
    return {"patch": "merge", "install": "patch"}[stage]


def greedy(ready: dict[str, str], prompt: list[int]) -> list[int]:
    body = {"model": ready["model"], "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{ready['url']}/completions", json=body, timeout=120)
    answer.raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


@pytest.mark.engine
def test_serve_survives_a_kill_at_every_event(undisturbed: Path, tmp_path: Path) -> None:
    """Nothing of a killed server is left behind, and the next one gives the answer of the reference."""
    port = str(free_port())
    command = ("serve", "--workdir", undisturbed, "--dtype", "float32", "--port")
    log = tmp_path / "events"
    for number in range(20):
        log.write_text("")
        assert killed_at(number, log, *command, port)
        if " checkpoint READY" in log.read_text():
            break
    else:
        pytest.fail("the server never became ready")
    with serving(*command, port) as server:
        assert greedy(server.ready, prompts()["p300"].ids) == references("A")["p300"].greedy[:8]
