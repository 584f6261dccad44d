"""``merge --from`` alone, as a user types it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import glm5deploy
from tests.support.data import SET_A
from tests.support.gguf_factory import merged_bytes, small_model, write_split

SET = SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL"
MERGED = json.loads((SET_A / "manifest.json").read_text())["models"]["GLM-tiny-A-UD-Q4_K_XL"]["merged"]


@pytest.mark.parametrize("options", [[], ["--io", "direct", "--verify", "--chunk-bytes", "65536"]])
def test_merge_from_a_shard(tmp_path: Path, options: list[str]) -> None:
    output = tmp_path / "A.gguf"
    shard = SET / "GLM-tiny-A-UD-Q4_K_XL-00003-of-00004.gguf"
    done = glm5deploy("merge", "--from", shard, "--output", output, "--json", *options)
    assert done.returncode == 0, done.stdout
    result = json.loads(done.stdout)
    digests = result.pop("sha256", {})
    assert result == {
        "output": str(output),
        "bytes": MERGED["bytes"],
        "io": "direct" if options else "buffered",
        "copied_bytes": result["copied_bytes"],
        "shared_bytes": 0,
        "resumed_at": 0,
        "verified_tensors": len(digests),
    }
    assert len(digests) == (112 if options else 0)
    assert hashlib.sha256(output.read_bytes()).hexdigest() == MERGED["sha256"]
    again = glm5deploy("merge", "--from", SET, "--output", output)
    assert (again.returncode, again.stdout) == (0, f"{output}: is merged already\n")


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = glm5deploy("merge", "--from", SET, "--output", tmp_path / "A.gguf", "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert (plan["would"], plan["bytes"], plan["tensors"]) == ("merge 4 shards", MERGED["bytes"], 112)
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage(tmp_path: Path) -> None:
    shards = write_split(small_model(), tmp_path / "set", [0, 8, 11, 11])
    before = {path: path.read_bytes() for path in shards}
    (tmp_path / "mine.gguf").write_bytes(b"mine")
    for arguments, code, words in (
        (["--from", shards[0]], 2, "--from needs --output"),
        (["--from", shards[0], "--output", shards[1]], 2, "is named like a shard"),
        (["--from", shards[0], "--output", tmp_path / "mine.gguf"], 2, "exists and is not the merge of these shards"),
        (["--from", shards[0], "--output", tmp_path / "no" / "a.gguf"], 2, "no such folder"),
        (["--from", shards[0], "--output", tmp_path / "a.gguf", "--no-merge"], 2, "--from always merges"),
        (["--from", tmp_path / "no.gguf", "--output", tmp_path / "a.gguf"], 1, "no such file"),
        (["--from", shards[0], "--output", tmp_path / "a.gguf", "--chunk-bytes", "5000"], 2, "is not possible"),
        (["--no-merge", "--mode", "always"], 2, "--no-merge contradicts --mode always"),
    ):
        done = glm5deploy("merge", *arguments)
        assert done.returncode == code, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
    assert {path: path.read_bytes() for path in shards} == before
    assert (tmp_path / "mine.gguf").read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.gguf", "set"]


def test_a_foreign_shard_needs_to_be_allowed(tmp_path: Path) -> None:
    shards = write_split(small_model(), tmp_path / "set", [0, 8, 11, 11])
    other = write_split(small_model(quant="Q8_0"), tmp_path / "other", [0, 8, 11, 11])
    shards[2].write_bytes(other[2].read_bytes())
    arguments: list[str | Path] = ["merge", "--from", shards[0], "--output", tmp_path / "out.gguf"]
    refused = glm5deploy(*arguments)
    assert refused.returncode == 1
    assert "looks like a shard of another quantisation" in refused.stderr
    assert "--allow-mixed" in refused.stderr
    assert glm5deploy(*arguments, "--allow-mixed").returncode == 0
    commands: tuple[tuple[str | Path, ...], ...] = (
        ("inspect", shards[0]),
        ("patch", "--gguf", shards[0], "--workdir", tmp_path / "work"),
    )
    for command in commands:
        refused = glm5deploy(*command)
        assert refused.returncode == 1
        said = " ".join((refused.stdout + refused.stderr).split())
        assert "glm5deploy merge --from SHARD --output FILE --allow-mixed" in said, "these have no such option"
    assert glm5deploy("inspect", tmp_path / "out.gguf").returncode == 0, "and this is what they take instead"


def test_ctrl_c_and_again(tmp_path: Path) -> None:
    """Interrupted while it waits for a slow disk (a debugger's stop), resumed by the same command."""
    shards = write_split(small_model(), tmp_path / "set", [0, 8, 11, 11])
    script = (
        "import os, signal, sys\n"
        "from glm5deploy.gguf_files import merge_job\n"
        "real = merge_job.Journal.reached\n"
        "def reached(self, position, digests):\n"
        "    real(self, position, digests)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "merge_job.Journal.reached = reached\n"
        "from glm5deploy.cli.app import main\n"
        "main()\n"
    )
    output = tmp_path / "out.gguf"
    arguments = ["merge", "--from", str(shards[0]), "--output", str(output)]
    stopped = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, env=dict(os.environ), timeout=60
    )
    assert stopped.returncode == 130, stopped.stderr
    assert "run the same command again" in stopped.stderr
    assert not output.exists()
    assert glm5deploy(*arguments).returncode == 0
    assert output.read_bytes() == merged_bytes(small_model())
