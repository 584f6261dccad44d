"""Partial files and their sidecars."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from glm5deploy.hub import partial as partial_module
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.partial import Partial

FILE = RemoteFile("Q4/m.gguf", 1000, "0" * 40, "a" * 64)


def begun(destination: Path, content: bytes = b"x" * 300) -> Path:
    partial = Partial(destination, FILE)
    partial.append(content)
    partial.remember('"v1"')
    partial.close()
    return partial.path


def test_a_partial_is_gone_on_with(tmp_path: Path) -> None:
    begun(tmp_path)
    again = Partial(tmp_path, FILE)
    assert (again.offset, again.etag) == (300, '"v1"')
    again.append(b"y" * 700)
    again.complete(tmp_path / "final" / "m.gguf")
    assert (tmp_path / "final" / "m.gguf").read_bytes() == b"x" * 300 + b"y" * 700
    assert [p for p in (tmp_path / ".fetch" / "Q4").iterdir() if p.name != ".gitignore"] == []


@pytest.mark.parametrize(
    "other", [replace(FILE, sha256="b" * 64), replace(FILE, size=1001), replace(FILE, sha256=None)]
)
def test_bytes_of_other_content_are_dropped(tmp_path: Path, other: RemoteFile) -> None:
    begun(tmp_path)
    partial = Partial(tmp_path, other)
    assert (partial.offset, partial.etag) == (0, None)
    assert partial.path.stat().st_size == 0


@pytest.mark.parametrize("sidecar", [b"", b"{", b"[]", b'{"size": 1000}'])
def test_without_a_sound_sidecar_nothing_is_known(tmp_path: Path, sidecar: bytes) -> None:
    path = begun(tmp_path)
    path.with_name(f"{path.name}.json").write_bytes(sidecar)
    assert Partial(tmp_path, FILE).offset == 0


def test_more_bytes_than_the_file_has_cannot_be_its(tmp_path: Path) -> None:
    begun(tmp_path, b"x" * 1001)
    assert Partial(tmp_path, FILE).offset == 0


def test_weak_etags_are_not_kept(tmp_path: Path) -> None:
    partial = Partial(tmp_path, FILE)
    partial.remember('W/"v1"')
    partial.close()
    assert Partial(tmp_path, FILE).etag is None


def test_wrong_bytes_are_kept_beside_for_comparison(tmp_path: Path) -> None:
    partial = Partial(tmp_path, FILE)
    partial.append(b"z" * 1000)
    partial.set_aside()
    assert partial.aside.read_bytes() == b"z" * 1000
    assert Partial(tmp_path, FILE).offset == 0


def test_wrong_bytes_go_where_there_is_no_room_for_two_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Partial(tmp_path, FILE)
    partial.append(b"z" * 1000)
    monkeypatch.setattr("glm5deploy.hub.partial.free_bytes", lambda _: 999)
    partial.set_aside()
    assert not partial.aside.exists()
    assert not partial.path.exists()


def test_the_disk_is_set_to_work_while_bytes_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[int, int]] = []
    real = partial_module.start_writeback

    def watched(handle: int, offset: int, length: int) -> None:
        begun.append((offset, length))
        real(handle, offset, length)

    monkeypatch.setattr(partial_module, "start_writeback", watched)
    monkeypatch.setattr(partial_module, "_WRITEBACK", 400)
    partial = Partial(tmp_path, FILE)
    for _ in range(5):
        partial.append(b"x" * 200)
    partial.complete(tmp_path / "m.gguf")
    assert begun == [(0, 400), (400, 400)]
    assert (tmp_path / "m.gguf").read_bytes() == b"x" * 1000


def test_the_final_name_is_durable_before_the_sidecar_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    partial = Partial(tmp_path, FILE)
    partial.append(b"x" * 1000)
    sidecar = partial.path.with_name("m.gguf.partial.json")

    def watched(folder: Path) -> None:
        assert (tmp_path / "Q4" / "m.gguf").exists()
        assert sidecar.exists()
        synced.append(folder)

    monkeypatch.setattr(partial_module, "sync_folder", watched)
    partial.complete(tmp_path / "Q4" / "m.gguf")
    assert synced == [tmp_path / "Q4", tmp_path]
    assert not sidecar.exists()


def test_that_content_was_wrong_is_remembered_for_this_content_only(tmp_path: Path) -> None:
    partial = Partial(tmp_path, FILE)
    assert not partial.wrong
    partial.append(b"z" * 1000)
    partial.set_aside()
    again = Partial(tmp_path, FILE)
    again.remember('"v2"')
    assert Partial(tmp_path, FILE).wrong
    assert not Partial(tmp_path, replace(FILE, sha256="b" * 64)).wrong
