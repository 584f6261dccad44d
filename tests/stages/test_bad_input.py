"""What goes wrong for a user, through the real command line: one clear line, a next step, the exit code, nothing lost.

vLLM missing or of another version is in test_patch.py and test_serve.py, an occupied port in test_serve.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from glm5deploy.demo.local_hub import LocalHub
from glm5deploy.pipeline.state import Record, State
from tests.support.cli import glm5deploy
from tests.support.data import SET_A, tiny_glm5
from tests.support.folders import write_folder_of
from tests.support.mounts import mounted
from tests.support.serving import free_port

A = SET_A / "GLM-tiny-A-GGUF" / "UD-Q4_K_XL"
SHARD = "GLM-tiny-A-UD-Q4_K_XL-0000{}-of-00004.gguf"


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def other_architecture(folder: Path) -> None:
    replace_bytes(
        folder / SHARD.format(1),
        b"\x08\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00glm-dsa",
        b"\x08\x00\x00\x00\x07\x00\x00\x00\x00\x00\x00\x00llama-x",
    )


def truncated(folder: Path) -> None:
    shard = folder / SHARD.format(3)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 1000)


def missing(folder: Path) -> None:
    (folder / SHARD.format(2)).unlink()


def of_another_set(folder: Path) -> None:
    shutil.copy(folder / SHARD.format(2), folder / SHARD.format(3))


def unknown_type(folder: Path) -> None:
    """The type number of a tensor, after its name, dimension count and dimensions, becomes one of ik_llama.cpp's."""
    shard = folder / SHARD.format(2)
    data = bytearray(shard.read_bytes())
    name = b"token_embd.weight"
    at = data.index(name) + len(name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    struct.pack_into("<I", data, at + 4 + 8 * dimensions, 137)
    shard.write_bytes(data)


CASES: list[tuple[Callable[[Path], None], str]] = [
    (other_architecture, "llama-x"),
    (truncated, SHARD.format(3)),
    (missing, SHARD.format(2)),
    (of_another_set, SHARD.format(3)),
    (unknown_type, "137"),
]


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with LocalHub() as hub:
        yield hub


def one_line_with_a_next_step(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    hint = next(line for line in done.stderr.splitlines() if line.startswith("hint: "))
    assert len(hint) > len("hint: ")
    for word in words:
        assert word in error + hint


@pytest.mark.parametrize(("damage", "word"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_bad_set_on_the_hub(hub: LocalHub, tmp_path: Path, damage: Callable[[Path], None], word: str) -> None:
    """The hub's own hashes fit, so that only looking into the files can tell."""
    folder = tmp_path / "repository" / "UD-Q4_K_XL"
    shutil.copytree(A, folder)
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    damage(folder)
    hub.publish("tiny/bad", folder.parent)
    workdir = tmp_path / "work"
    command = ("run", "tiny/bad:UD-Q4_K_XL", "--until", "patch", "--workdir", workdir)
    one_line_with_a_next_step(glm5deploy(*command, env={"HF_ENDPOINT": hub.endpoint}), 1, word)


@pytest.mark.parametrize("damage", [truncated, missing, of_another_set], ids=lambda f: f.__name__)
def test_a_bad_set_on_disk_is_left_as_it_is(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "set"
    shutil.copytree(A, folder)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    damage(folder)
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    output = tmp_path / "out.gguf"
    one_line_with_a_next_step(glm5deploy("merge", "--from", folder / SHARD.format(1), "--output", output), 1)
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()} == before
    assert not output.exists()


def test_a_schedule_that_the_file_does_not_say(tmp_path: Path) -> None:
    """B-Q4_K_M is refused with the option that names one, and accepted with it."""
    folder = tiny_glm5() / "GLM-tiny-B-GGUF" / "Q4_K_M"
    refused = glm5deploy("patch", "--gguf", folder, "--workdir", tmp_path)
    one_line_with_a_next_step(refused, 1, "schedule", "--indexer-schedule")
    planned = glm5deploy("patch", "--gguf", folder, "--indexer-schedule", "FSFS", "--dry-run", "--workdir", tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "FSFS" in planned.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tp", "3"), ("3", "heads")),
        (("--tp", "2", "--weights", "quantised"), ("ffn_down_exps", "blocks of 256")),
    ],
    ids=["does not divide the heads", "cuts a super-block"],
)
def test_ranks_that_cannot_share_the_model(tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Refused from the headers alone, before anything is started."""
    prepared(tmp_path)
    done = glm5deploy("serve", *flags, "--dry-run", "--workdir", tmp_path)
    one_line_with_a_next_step(done, 2, *words)


def prepared(workdir: Path) -> None:
    """A work folder in which every stage before serve is recorded as done, over set A's shards where they are."""
    write_folder_of(A, workdir / "model")
    state = State(workdir, pytest.fail)
    facts = {"folder": str(workdir / "model"), "index_topk": 64}
    install = {"attention": "triton", "backend": "GLM5_TRITON_SPARSE", "device": {"type": "cpu"}, "versions": {}}
    for stage, outputs in (("fetch", {"files": []}), ("merge", {"files": []}), ("patch", facts), ("install", install)):
        state.write(stage, Record({}, outputs, "2026-01-01T00:00:00+00:00", 0.0, "0"))


def test_a_full_disk_keeps_what_is_there(hub: LocalHub, tmp_path: Path) -> None:
    hub.publish("tiny/A", A.parent)
    environment = {"HF_ENDPOINT": hub.endpoint}
    with mounted("ext4", tmp_path, 36) as folder:
        command = ("run", "tiny/A:UD-Q4_K_XL", "--until", "merge", "--workdir", folder / "work")
        one_line_with_a_next_step(glm5deploy(*command, env=environment), 1, "MB free", "--no-merge")
        fetched = glm5deploy(
            "fetch",
            "--workdir",
            folder / "work",
            "tiny/A:UD-Q4_K_XL",
            env={**environment, "GLM5DEPLOY_MERGE_MODE": "never"},
        )
        assert fetched.returncode == 0, fetched.stderr
        one_line_with_a_next_step(glm5deploy("merge", "--mode", "always", "--workdir", folder / "work"), 1, "free")
        sound = glm5deploy("verify", "--workdir", folder / "work")
        assert sound.returncode == 0, sound.stdout


def test_a_folder_that_may_only_be_read_is_verified_all_the_same(hub: LocalHub, tmp_path: Path) -> None:
    hub.publish("tiny/A", A.parent)
    with mounted("ext4", tmp_path, 48) as folder:
        work = ("--workdir", folder / "work")
        fetched = glm5deploy("fetch", *work, "tiny/A:UD-Q4_K_XL", env={"HF_ENDPOINT": hub.endpoint})
        assert fetched.returncode == 0, fetched.stderr
        shards = sorted((folder / "work").rglob("*.gguf"))
        replace_bytes(shards[2], shards[2].read_bytes()[-64:], bytes(64))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        found = glm5deploy("verify", *work)
        assert found.returncode == 1, found.stderr
        assert "Read-only file system; what was found is not recorded" in found.stderr
        shown = json.loads(glm5deploy("verify", "--json", *work).stdout)
        assert [shard["verdict"] for shard in shown["shards"]] == ["sound", "sound", "hash", "sound"]
        assert (shown["damaged"], shown["recorded"]) == (1, False)


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


@pytest.mark.slow
def test_a_full_disk_when_serving(tmp_path: Path) -> None:
    """The log or a record cannot be written: one line, and no server is left."""
    with mounted("ext4", tmp_path, 36) as folder:
        workdir = folder / "work"
        prepared(workdir)
        fill(folder / "filler")
        one_line_with_a_next_step(glm5deploy("serve", "--port", str(free_port()), "--workdir", workdir), 1)
