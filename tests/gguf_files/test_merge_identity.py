"""Shards that are not the ones a merge was made of, or is being made of, whatever their names, sizes and dates."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from glm5deploy.errors import UsageError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_options import MergeOptions
from tests.support.gguf_factory import merged_bytes, small_model, write_split

SIZES = [0, 8, 11, 11]
OLD = small_model()
NEW = replace(OLD, tensors=tuple(replace(tensor, seed=1) for tensor in OLD.tensors))
CONSUME = MergeOptions(consume=True, journal_bytes=1 << 14, existing="replace")


def stopped(source: Path, output: Path, options: MergeOptions, event: str, times: int = 1) -> None:
    """Merge until the n-th checkpoint that begins with ``event``, then stop as Ctrl-C would."""
    left = times

    def stop(message: str) -> None:
        nonlocal left
        left -= message.startswith(event)
        if not left:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(source, output, options, checkpoint=stop)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("event", ["begun", "released", "renamed"])
def test_a_release_does_not_go_on_with_other_shards(tmp_path: Path, event: str) -> None:
    """A newer commit's shards have come in between, under the same names and with the same sizes."""
    folder, output = tmp_path / "set", tmp_path / "out.gguf"
    source = write_split(OLD, folder, SIZES)[0]
    stopped(source, output, CONSUME, event, 3 if event == "released" else 1)
    for path in list(folder.glob("*.gguf")):
        path.unlink()
    write_split(NEW, folder, SIZES)
    before = content(folder)
    with pytest.raises(UsageError, match="is not the file that the interrupted merge --consume began with") as caught:
        merge(source, output, CONSUME)
    assert caught.value.hint is not None
    assert "give the merge up" in caught.value.hint
    assert content(folder) == before
    for leftover in (*tmp_path.glob("*.partial*"), *folder.glob("*.consumed")):
        leftover.unlink()
    merge(source, output, CONSUME)
    assert output.read_bytes() == merged_bytes(NEW)


def test_a_shard_with_holes_is_not_exchanged_for_another(tmp_path: Path) -> None:
    folder, output = tmp_path / "set", tmp_path / "out.gguf"
    source = write_split(OLD, folder, SIZES)[0]
    stopped(source, output, CONSUME, "released", 2)
    aside = next(folder.glob("*.consumed"))
    size = aside.stat().st_size
    aside.rename(tmp_path / "kept")  # keeps its inode from being given to the next file
    aside.write_bytes(bytes(size))
    with pytest.raises(UsageError, match=r"\.consumed: is not the file"):
        merge(source, output, CONSUME)
    (tmp_path / "kept").rename(aside)
    merge(source, output, CONSUME)
    assert output.read_bytes() == merged_bytes(OLD)


def test_a_finished_merge_whose_journal_is_left_is_not_that_of_new_shards(tmp_path: Path) -> None:
    folder, output = tmp_path / "set", tmp_path / "out.gguf"
    source = write_split(OLD, folder, SIZES)[0]
    stopped(source, output, MergeOptions(), "renamed")
    shutil.rmtree(folder)
    write_split(NEW, folder, SIZES)
    merge(source, output, MergeOptions(existing="replace"))
    assert output.read_bytes() == merged_bytes(NEW)


def linked(source: Path, target: Path) -> None:
    target.unlink()
    target.hardlink_to(source)


def moved(source: Path, target: Path) -> None:
    source.replace(target)


def copied_over(source: Path, target: Path) -> None:
    shutil.copy2(source, target)


@pytest.mark.parametrize("attribute", [True, False])
@pytest.mark.parametrize("put", [linked, moved, copied_over])
def test_older_shards_in_place_of_the_merged_ones(
    tmp_path: Path, put: Callable[[Path, Path], None], attribute: bool
) -> None:
    """Links, moves and copies keep a date long before the merge."""
    shards, output = write_split(OLD, tmp_path / "set", SIZES), tmp_path / "out.gguf"
    others = write_split(NEW, tmp_path / "other", SIZES)
    for path in others:
        os.utime(path, (1e9, 1e9))
    merge(shards[0], output)
    if not attribute:
        for name in os.listxattr(output):
            os.removexattr(output, name)
    assert merge(shards[0], output).mode == "none"
    for source, target in zip(others, shards, strict=True):
        put(source, target)
    with pytest.raises(UsageError, match="is not the merge of these shards"):
        merge(shards[0], output)
    merge(shards[0], output, MergeOptions(existing="replace"))
    assert output.read_bytes() == merged_bytes(NEW)


def test_an_old_merge_is_not_taken_for_one_that_has_released_its_shards(tmp_path: Path) -> None:
    """Interrupted while it replaced the file of an earlier set, on a file system without attributes."""
    folder, output = tmp_path / "set", tmp_path / "out.gguf"
    merge(write_split(OLD, folder, SIZES)[0], output)
    for name in os.listxattr(output):
        os.removexattr(output, name)
    shards = write_split(NEW, folder, SIZES)
    source = shards[0]
    for path in shards:
        os.utime(path, (1e9, 1e9))
    stopped(source, output, CONSUME, "released", 3)
    merge(source, output, CONSUME)
    assert output.read_bytes() == merged_bytes(NEW)
