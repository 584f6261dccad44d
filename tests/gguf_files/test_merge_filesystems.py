"""What depends on the file system: O_DIRECT, shared blocks, punched holes, a disk that fills up."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from glm5deploy.errors import DiskFullError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.linux_files import can_punch
from glm5deploy.gguf_files.merge_options import MergeOptions
from glm5deploy.gguf_files.shards import ShardSet
from tests.support.gguf_factory import Model, Tensor, merged_bytes, write_split
from tests.support.mounts import mounted

TENSOR_BYTES = 2 << 20
SIZES = [0, 8, 8, 4]
KINDS = ["ext4", "xfs", "btrfs"]


def model(alignment: int = 32) -> Model:
    """42 MB: with alignment 4096 every tensor can share its blocks with the shard's."""
    elements = TENSOR_BYTES // 4
    return Model(tensors=tuple(Tensor(f"t{i}", "F32", (elements + i % 3,)) for i in range(20)), alignment=alignment)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path, 400) as point:
        yield point


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def free(folder: Path) -> int:
    os.sync()
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def test_every_way_of_copying(disk: Path) -> None:
    expected = hashlib.sha256(merged_bytes(model())).hexdigest()
    source = write_split(model(), disk / "set", SIZES)[0]
    for mode in ("buffered", "direct"):
        result = merge(source, disk / "out.gguf", MergeOptions(mode=mode, existing="redo"))  # type: ignore[arg-type]
        assert (result.mode, sha256(disk / "out.gguf")) == (mode, expected)


def test_blocks_are_shared_where_they_can_be(disk: Path) -> None:
    source = write_split(model(4096), disk / "set", SIZES)[0]
    expected = merged_bytes(model(4096))
    before = free(disk)
    for number, options in enumerate((MergeOptions(), MergeOptions(verify=True), MergeOptions(mode="direct"))):
        output = disk / f"out{number}.gguf"
        result = merge(source, output, options)
        assert output.read_bytes() == expected
        if disk.name == "ext4":
            assert result.cloned == 0
            output.unlink()
        else:
            assert result.cloned > 0.9 * len(expected)
            assert result.copied < 1 << 20 or options.verify
    if disk.name != "ext4":
        assert before - free(disk) < len(expected) // 2, "three merged files cost less than half of one"


def test_sharing_survives_an_interruption(disk: Path) -> None:
    source = write_split(model(4096), disk / "set", SIZES)[0]

    def stop(message: str) -> None:
        if message == "begun":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(source, disk / "out.gguf", checkpoint=stop)
    merge(source, disk / "out.gguf")
    assert (disk / "out.gguf").read_bytes() == merged_bytes(model(4096))


@pytest.mark.parametrize("alignment", [32, 4096])
def test_shards_are_released_on_the_way(disk: Path, alignment: int) -> None:
    source = write_split(model(alignment), disk / "set", SIZES)[0]
    size = ShardSet.open(source).file_bytes
    assert can_punch(disk)
    before, least = free(disk), []
    options = MergeOptions(consume=True, journal_bytes=2 * TENSOR_BYTES + 100)

    def watch(message: str) -> None:
        if message.startswith(("recorded", "released")):
            least.append(free(disk))

    merge(source, disk / "out.gguf", options, checkpoint=watch)
    assert (disk / "out.gguf").read_bytes() == merged_bytes(model(alignment))
    assert [path.name for path in (disk / "set").iterdir()] == []
    assert len(least) > 10
    at_once = 4 * TENSOR_BYTES if disk.name != "btrfs" else 12 * TENSOR_BYTES
    assert before - min(least) < at_once < 0.6 * size, "a batch (btrfs: a shard of one extent) and not the whole set"


def test_shards_are_removed_where_holes_cannot_be_punched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm5deploy.gguf_files.consume.can_punch", lambda _: False)
    with mounted("ext4", tmp_path, 400) as disk:
        source = write_split(model(), disk / "set", SIZES)[0]
        before, least = free(disk), []
        options = MergeOptions(consume=True, journal_bytes=2 * TENSOR_BYTES + 100)
        merge(source, disk / "out.gguf", options, checkpoint=lambda _: least.append(free(disk)))
        assert (disk / "out.gguf").read_bytes() == merged_bytes(model())
        assert before - min(least) < 10 * TENSOR_BYTES, "the room of one shard"


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_full_disk(tmp_path: Path, kind: str) -> None:
    """No room for the merged file: refused before copying, nothing left behind. --consume merges in the same room."""
    with mounted(kind, tmp_path, 400) as disk:
        source = write_split(model(), disk / "set", SIZES)[0]
        size = ShardSet.open(source).file_bytes
        with (disk / "ballast").open("wb") as ballast:
            os.posix_fallocate(ballast.fileno(), 0, free(disk) - size // 2)
        with pytest.raises(DiskFullError, match=r"the merged file needs [\d.]+ MB more, [\d.]+ MB are free") as caught:
            merge(source, disk / "out.gguf")
        assert caught.value.hint is not None
        assert "--consume" in caught.value.hint
        assert sorted(path.name for path in disk.iterdir() if path.name.startswith("out")) == []
        with pytest.raises(DiskFullError, match="--consume needs"):
            merge(source, disk / "out.gguf", MergeOptions(consume=True))
        merge(source, disk / "out.gguf", MergeOptions(consume=True, journal_bytes=4 << 20))
        assert sha256(disk / "out.gguf") == hashlib.sha256(merged_bytes(model())).hexdigest()


def test_the_disk_fills_up_on_the_way(tmp_path: Path) -> None:
    """Somebody else takes the last blocks during --consume, which cannot reserve: an error, and resumable."""
    with mounted("ext4", tmp_path, 200) as disk:
        source = write_split(model(), disk / "set", SIZES)[0]
        ballast = disk / "ballast"

        def fill(message: str) -> None:
            if message.startswith("released") and not ballast.exists():
                with ballast.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, free(disk) - (64 << 10))

        options = MergeOptions(consume=True, journal_bytes=4 << 20)
        with pytest.raises(DiskFullError):
            merge(source, disk / "out.gguf", options, checkpoint=fill)
        ballast.unlink()
        assert merge(source, disk / "out.gguf", options).resumed_at > 0
        assert sha256(disk / "out.gguf") == hashlib.sha256(merged_bytes(model())).hexdigest()


def test_from_one_file_system_to_another(tmp_path: Path) -> None:
    with mounted("xfs", tmp_path, 400) as disk:
        source = write_split(model(4096), disk / "set", SIZES)[0]
        for mode in ("buffered", "direct"):
            result = merge(source, tmp_path / f"{mode}.gguf", MergeOptions(mode=mode))  # type: ignore[arg-type]
            assert result.cloned == 0
            assert (tmp_path / f"{mode}.gguf").read_bytes() == merged_bytes(model(4096))
