"""Kill a merge before each of its writes, flushes and renames in turn; the next run must end with the same bytes."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.journal import load_journal
from glm5deploy.gguf_files.merge_options import MergeOptions
from glm5deploy.gguf_files.shards import ShardSet
from tests.support.data import REPOSITORY
from tests.support.gguf_factory import merged_bytes, small_model, write_split

MODEL = small_model(layers=1)
EXPECTED = merged_bytes(MODEL)
STEPS = {"segment_bytes": 9_000, "journal_bytes": 12_000, "chunk_bytes": 8192}
CONSUME = {"consume": True, **STEPS}


def fresh(folder: Path) -> tuple[Path, Path]:
    """A new split set and the output to merge it into."""
    shutil.rmtree(folder, ignore_errors=True)
    return write_split(MODEL, folder, [0, 4, 3, 2])[1], folder / "out.gguf"


def run(number: int, source: Path, output: Path, options: dict[str, object]) -> int | None:
    """Merge and die before call ``number``; the number of calls there are if it never came to that."""
    command = [sys.executable, "-m", "tests.support.kill_merge", str(number), str(source), str(output)]
    done = subprocess.run([*command, json.dumps(options)], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def lose_power(output: Path, seed: int) -> None:
    """What a power cut may do on top of a kill: everything not flushed is garbage, the journal's last line is torn."""
    partial = output.with_name(output.name + ".partial")
    journal = output.with_name(output.name + ".partial.journal")
    state = load_journal(journal)
    if state is None or not partial.exists():
        return
    position = max(state.position, int(state.plan["header_bytes"]))
    with partial.open("r+b") as file:
        file.seek(position)
        file.write(random.Random(seed).randbytes(partial.stat().st_size - position))
    if state.position:
        with journal.open("ab") as file:
            file.write(b'{"position": 99999999, "sha2')


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, STEPS, {"mode": "direct", **STEPS}, {"verify": True, **STEPS}, CONSUME], ids=json.dumps
)
def test_killed_before_every_change(tmp_path: Path, options: dict[str, object]) -> None:
    folder = tmp_path / "set"
    total = run(-1, *fresh(folder), options)
    assert total is not None
    assert total > 8
    kept = [] if options.get("consume") else [f"tiny-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    for number in range(total):
        source, output = fresh(folder)
        assert run(number, source, output, options) is None
        if output.exists():
            assert output.read_bytes() == EXPECTED, "the name is given to a whole file only"
        lose_power(output, number)
        if output.exists() and not source.exists() and not output.with_name("out.gguf.partial.journal").exists():
            continue  # finished but for the exit; there is nothing left to merge
        merge(source, output, MergeOptions(**options))  # type: ignore[arg-type]
        assert output.read_bytes() == EXPECTED, number
        assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "out.gguf"])


@pytest.mark.slow
@pytest.mark.parametrize("options", [STEPS, CONSUME], ids=json.dumps)
def test_killed_again_and_again(tmp_path: Path, options: dict[str, object]) -> None:
    """Each run gets a little further; none begins anew."""
    source, output = fresh(tmp_path / "set")
    for attempt in range(200):
        if run(14, source, output, options) is not None:
            break
        lose_power(output, attempt)
        if output.exists() and not output.with_name("out.gguf.partial.journal").exists():
            break
    else:
        pytest.fail("no progress from run to run")
    assert attempt > 2
    assert output.read_bytes() == EXPECTED


def interrupted(source: Path, output: Path, options: dict[str, object], event: str) -> None:
    """Merge until a checkpoint that begins with ``event``, then stop as Ctrl-C would."""

    def stop(message: str) -> None:
        if message.startswith(event):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(source, output, MergeOptions(**options), checkpoint=stop)  # type: ignore[arg-type]


def test_an_interrupted_release_is_not_taken_for_a_set(tmp_path: Path) -> None:
    source, output = fresh(tmp_path / "set")
    interrupted(source, output, CONSUME, "released")
    with pytest.raises(FileFormatError, match="1 of 4 shards are missing") as caught:
        ShardSet.open(source)
    assert caught.value.hint is not None
    assert "--consume" in caught.value.hint
    with pytest.raises(UsageError, match="a merge with --consume was interrupted"):
        merge(source, output)
    merge(source, output, MergeOptions(**CONSUME))  # type: ignore[arg-type]
    assert output.read_bytes() == EXPECTED
    assert [path.name for path in source.parent.iterdir()] == ["out.gguf"]


def test_a_partial_file_that_was_changed(tmp_path: Path) -> None:
    """Begun anew while the shards are there; refused, and nothing released, once they are not."""
    for options in (STEPS, CONSUME):
        source, output = fresh(tmp_path / "set")
        interrupted(source, output, options, "released" if options is CONSUME else "recorded")
        partial = output.with_name("out.gguf.partial")
        partial.write_bytes(b"x" + partial.read_bytes()[1:])
        if options is STEPS:
            assert merge(source, output, MergeOptions(**options)).resumed_at == 0  # type: ignore[arg-type]
            assert output.read_bytes() == EXPECTED
        else:
            before = sorted(path.name for path in source.parent.iterdir())
            with pytest.raises(DeployError, match=r"is not the file that .*journal describes"):
                merge(source, output, MergeOptions(**options))  # type: ignore[arg-type]
            assert sorted(path.name for path in source.parent.iterdir()) == before


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"\x00\xff\n", b'{"format": 1}\n', b'{"format": 99}\n'])
def test_a_damaged_journal_counts_as_none(tmp_path: Path, damage: bytes) -> None:
    source, output = fresh(tmp_path / "set")
    interrupted(source, output, STEPS, "recorded")
    output.with_name("out.gguf.partial.journal").write_bytes(damage)
    assert merge(source, output, MergeOptions(**STEPS)).resumed_at == 0  # type: ignore[arg-type]
    assert output.read_bytes() == EXPECTED


def test_options_may_change_between_runs(tmp_path: Path) -> None:
    for second in ({}, {"mode": "direct"}, {"verify": True}, {"consume": True}, {"threads": 3, "segment_bytes": 500}):
        source, output = fresh(tmp_path / "set")
        interrupted(source, output, STEPS, "recorded")
        result = merge(source, output, MergeOptions(**second))  # type: ignore[arg-type]
        assert (result.resumed_at > 0) == ("verify" not in second and "consume" not in second)
        assert output.read_bytes() == EXPECTED
    source, output = fresh(tmp_path / "set")
    interrupted(source, output, {"verify": True, **STEPS}, "recorded")
    result = merge(source, output)
    assert result.resumed_at > 0
    assert len(result.sha256) == len(MODEL.tensors), "what was begun with --verify is finished with it"


def test_consume_refuses_links(tmp_path: Path) -> None:
    source, output = fresh(tmp_path / "set")
    for number in (1, 2, 3, 4):
        path = source.with_name(f"tiny-0000{number}-of-00004.gguf")
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    with pytest.raises(UsageError, match="is a link, and --consume would destroy the file behind it"):
        merge(source, output, MergeOptions(consume=True))
    source.unlink()
    (tmp_path / source.name).rename(source)
    (tmp_path / "second-name").hardlink_to(source)
    with pytest.raises(UsageError, match="is a link"):
        merge(source, output, MergeOptions(consume=True))
    assert merge(source, output).copied > 0


def test_a_journal_can_only_have_the_named_shards_released(tmp_path: Path) -> None:
    source, output = fresh(tmp_path / "set")
    interrupted(source, output, CONSUME, "recorded")
    other = write_split(MODEL, tmp_path / "other", [0, 4, 3, 2])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="an interrupted merge --consume of other shards is here"):
        merge(other[0], output, MergeOptions(**CONSUME))  # type: ignore[arg-type]
    assert sorted(tmp_path.rglob("*")) == before
    merge(source.parent, output, MergeOptions(**CONSUME))  # type: ignore[arg-type]
    assert output.read_bytes() == EXPECTED
