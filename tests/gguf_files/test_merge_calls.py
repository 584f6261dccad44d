"""System calls that fail or do half of what they were asked for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_options import MergeOptions
from tests.support.gguf_factory import Layout, merged_bytes, small_model, write_split

SIZES = [0, 8, 11, 11]


def test_an_unreadable_sector_names_its_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = write_split(small_model(), tmp_path / "set", SIZES)
    read = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == shards[2]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(DeployError) as caught:
        merge(shards[0], tmp_path / "out.gguf")
    assert caught.value.message.startswith(f"{shards[2]}: at offset ")
    assert caught.value.message.endswith("Input/output error")
    assert caught.value.hint is not None
    assert "fetch --repair" in caught.value.hint
    monkeypatch.undo()
    merge(shards[0], tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == merged_bytes(small_model())


def test_writes_that_stop_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dirty = Layout(padding=b"\xaa")
    shards = write_split(small_model(), tmp_path / "set", SIZES, layouts={1: dirty, 2: dirty, 3: dirty})
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[: -(-len(data) // 2)], offset))
    merge(shards[0], tmp_path / "out.gguf", MergeOptions(mode="buffered"))
    assert (tmp_path / "out.gguf").read_bytes() == merged_bytes(small_model())
