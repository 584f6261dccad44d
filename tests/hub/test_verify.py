"""Proof of what is on disk, repair of what is not sound, and adoption of other copies."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from glm5deploy.errors import DeployError, FileFormatError, HubError
from glm5deploy.hub import adopt
from glm5deploy.hub import verify as verify_module
from glm5deploy.hub.hashing import FileHash, prefix_step
from glm5deploy.hub.verify import is_verified, shard_states, verify
from tests.hub.conftest import QUANT, Fetcher


def damage(path: Path, offset: int) -> None:
    """Flip a byte and keep size and mtime, as a failing disk would."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_sound_shards(fetcher: Fetcher) -> None:
    fetcher.run()
    verdicts = verify(fetcher.plan(), fetcher.destination)
    assert [v.problem for v in verdicts] == ["", "", ""]
    assert all(is_verified(fetcher.destination, v.file) for v in verdicts)


def test_damaged_missing_and_short_shards_are_named_and_repaired_alone(fetcher: Fetcher) -> None:
    paths = fetcher.run()
    plan = fetcher.plan()
    damage(paths[1], 1_200_000)
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    served = fetcher.server.served["bytes"]
    verdicts = verify(plan, fetcher.destination)
    assert [v.problem for v in verdicts] == ["", "hash", "size"]
    assert verdicts[1].span == (prefix_step(0), plan.files[1].size)
    assert "first between bytes 1048576 and" in verdicts[1].detail
    assert str(paths[1]) in verdicts[1].detail
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == served + plan.files[1].size + plan.files[2].size
    assert any("differs in bytes 1048576-" in note for note in fetcher.notes)
    # What was moved aside is kept: it may not have been ours.
    assert len(list((fetcher.destination / ".fetch" / "aside").rglob("*.gguf.*"))) == 2
    paths[0].unlink()
    assert [v.problem for v in verify(plan, fetcher.destination)] == ["missing", "", ""]


def test_damage_in_the_tail_is_located_too(fetcher: Fetcher) -> None:
    paths = fetcher.run()
    plan = fetcher.plan()
    damage(paths[0], 299_999)
    assert verify(plan, fetcher.destination)[0].problem == "hash"
    damage(paths[1], 10)
    assert verify(plan, fetcher.destination)[1].span == (0, 1 << 20)
    # The record is withdrawn, the prefixes stay: asked again, it says the same.
    assert verify(plan, fetcher.destination)[1].span == (0, 1 << 20)


def test_a_foreign_file_under_a_shards_name_is_kept_aside(fetcher: Fetcher) -> None:
    target = fetcher.destination / QUANT / "m-00001-of-00003.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"the user's own notes")
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    aside = next((fetcher.destination / ".fetch" / "aside").rglob("*.gguf.1"))
    assert aside.read_bytes() == b"the user's own notes"
    assert any(str(aside) in note for note in fetcher.notes)


def test_whole_shards_that_are_there_already_are_hashed_not_fetched(fetcher: Fetcher) -> None:
    target = fetcher.destination / QUANT
    target.mkdir(parents=True)
    for path in (fetcher.source / QUANT).iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    fetcher.run()
    assert fetcher.server.served["bytes"] == 0
    assert len(fetcher.proved) == 3


def test_states_without_reading(fetcher: Fetcher) -> None:
    paths = fetcher.run()
    plan = fetcher.plan()
    paths[0].touch()
    paths[1].unlink()
    fetcher.partial(2).write_bytes(bytes(1000))
    paths[2].unlink()
    found = [(s.state, s.present) for s in shard_states(plan, fetcher.destination)]
    assert found == [("unverified", plan.files[0].size), ("partial", 1000), ("missing", 0)]


def test_proved_bytes_that_are_no_gguf_set_are_refused(fetcher: Fetcher) -> None:
    second = fetcher.source / QUANT / "m-00002-of-00003.gguf"
    second.write_bytes((fetcher.source / QUANT / "m-00003-of-00003.gguf").read_bytes())
    fetcher.server.publish("owner/model-GGUF", fetcher.source)
    with pytest.raises(FileFormatError, match="m-00002-of-00003"):
        fetcher.run()


def test_proved_bytes_that_are_no_gguf_at_all_are_refused(fetcher: Fetcher) -> None:
    (fetcher.source / QUANT / "m-00002-of-00003.gguf").write_bytes(b"<html>sign in</html>" * 100)
    fetcher.server.publish("owner/model-GGUF", fetcher.source)
    with pytest.raises(FileFormatError, match="m-00002-of-00003"):
        fetcher.run()


@pytest.mark.parametrize("how", ["reflink or hard link", "copy"])
def test_copies_elsewhere_are_adopted_by_hash(
    fetcher: Fetcher, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    names = ["renamed.bin", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"]
    for content, name in zip(fetcher.originals(), names, strict=True):
        (elsewhere / name).write_bytes(content)
    damage(elsewhere / names[2], 17)
    if how == "copy":
        monkeypatch.setattr(adopt.os, "link", _cross_device)
        monkeypatch.setattr(adopt.fcntl, "ioctl", _cross_device)
    fetcher.run(adopt=tmp_path / "elsewhere")
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == len(fetcher.originals()[2])
    taken = [note for note in fetcher.notes if "taken over from" in note]
    assert len(taken) == 2
    assert all(("(copy)" in note) == (how == "copy") for note in taken)
    assert (elsewhere / names[0]).read_bytes() == fetcher.originals()[0]


@pytest.mark.parametrize("proved_by", ["fetch", "verify"])
def test_what_a_kill_left_of_a_complete_shard_goes_when_it_is_proved(fetcher: Fetcher, proved_by: str) -> None:
    """The state between the last steps: the shard has its name, its sidecar is there still, and it has no record."""
    fetcher.run()
    left = [path.with_name(f"{path.name}.json") for path in (fetcher.partial(1), fetcher.partial(2))]
    left += [fetcher.partial(2).with_suffix(".mismatch")]
    for path in left:
        path.write_bytes(b"{}")
    for number in (1, 2):
        fetcher.partial(number).with_suffix(".verified.json").unlink()
    if proved_by == "verify":
        verify(fetcher.plan(), fetcher.destination)
    else:
        fetcher.run()
    assert [path for path in left if path.exists()] == []
    assert [state.state for state in shard_states(fetcher.plan(), fetcher.destination)] == ["verified"] * 3


def test_half_a_download_of_an_adopted_shard_goes(fetcher: Fetcher) -> None:
    half = fetcher.partial(2)
    half.parent.mkdir(parents=True)
    half.write_bytes(b"x" * 1000)
    fetcher.run(adopt=fetcher.source)
    assert fetcher.server.served["bytes"] == 0
    assert not half.exists()


def _cross_device(*_: object) -> None:
    raise OSError(18, "Invalid cross-device link")


def test_the_hub_cache_of_other_programs_is_adopted(fetcher: Fetcher, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    cache = tmp_path / "cache"
    snapshot_download("owner/model-GGUF", cache_dir=cache, endpoint=fetcher.server.endpoint)
    served = fetcher.server.served["bytes"]
    fetcher.run(adopt=cache)
    assert fetcher.server.served["bytes"] == served
    assert fetcher.fetched() == fetcher.originals()
    for path in (fetcher.destination / QUANT).glob("*.gguf"):
        assert not path.is_symlink()


def test_offline_names_what_is_missing_and_is_content_with_what_is_there(fetcher: Fetcher) -> None:
    from glm5deploy.hub.download import Download

    paths = fetcher.run()
    plan = fetcher.plan()
    asked = len(fetcher.server.requests)
    assert Download(fetcher.hub(offline=True), plan, fetcher.destination).run() == paths
    paths[1].unlink()
    with pytest.raises(HubError, match="1 shards are not here: UD-Q4_K_XL/m-00002"):
        Download(fetcher.hub(offline=True), plan, fetcher.destination).run()
    assert len(fetcher.server.requests) == asked


def test_a_damaged_shard_without_prefix_hashes_is_withdrawn_too(fetcher: Fetcher) -> None:
    """Below one MiB there are none; the record must go all the same, or a repair changes nothing."""
    paths = fetcher.run()
    plan = fetcher.plan()
    damage(paths[0], 100_000)
    assert verify(plan, fetcher.destination)[0].problem == "hash"
    assert not is_verified(fetcher.destination, plan.files[0])
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_a_shard_that_cannot_be_read_is_a_verdict_and_is_fetched_again(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = fetcher.run()
    plan = fetcher.plan()
    fail_reading(monkeypatch, paths[1], errno.EIO)
    verdicts = verify(plan, fetcher.destination)
    assert [v.problem for v in verdicts] == ["", "unreadable", ""]
    assert "cannot be read after byte 0: Input/output error" in verdicts[1].detail
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert any("m-00002-of-00003.gguf.1" in note for note in fetcher.notes)


def test_a_shard_that_may_not_be_read_is_not_taken_for_damaged(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = fetcher.run()
    plan = fetcher.plan()
    fail_reading(monkeypatch, paths[1], errno.EACCES)
    with pytest.raises(DeployError, match="Permission denied"):
        verify(plan, fetcher.destination)
    assert is_verified(fetcher.destination, plan.files[1])


def test_a_candidate_that_cannot_be_read_is_named_and_another_taken(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fetcher.source / QUANT / "m-00002-of-00003.gguf"
    copied = fetcher.source / "copy of shard 2"
    shutil.copyfile(here, copied)
    fail_reading(monkeypatch, here, errno.EACCES, adopt)
    fetcher.run(adopt=fetcher.source)
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == 0
    notes = [note for note in fetcher.notes if "00002" in note]
    assert notes[0] == f"{here} may be {here.name}, but cannot be read and is passed over: Permission denied"
    assert notes[1].startswith(f"{here.name}: taken over from {copied} ")


def test_without_another_copy_the_file_that_may_not_be_read_is_the_users_to_mend(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fetcher.source / QUANT / "m-00002-of-00003.gguf"
    fail_reading(monkeypatch, here, errno.EACCES, adopt)
    with pytest.raises(DeployError, match=r"00002-of-00003\.gguf cannot be read: Permission denied") as error:
        fetcher.run(adopt=fetcher.source)
    assert "make it readable" in (error.value.hint or "")
    assert fetcher.server.served["bytes"] == 0


def test_a_spoilt_copy_is_fetched_but_want_of_handles_is_no_reason_to(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = fetcher.source / QUANT / "m-00002-of-00003.gguf"
    with monkeypatch.context() as patch:
        fail_reading(patch, here, errno.EMFILE, adopt)
        with pytest.raises(OSError, match="Too many open files"):
            fetcher.run(adopt=fetcher.source)
    fail_reading(monkeypatch, here, errno.EIO, adopt)
    fetcher.run(adopt=fetcher.source)
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == here.stat().st_size


def fail_reading(monkeypatch: pytest.MonkeyPatch, path: Path, code: int, module: ModuleType = verify_module) -> None:
    """Reading ``path`` as it is now fails; a new file of that name is read."""
    inode, real = path.stat().st_ino, module.hash_into

    def failing(hasher: FileHash, which: Path, length: int, **options: Any) -> int:
        if which.stat().st_ino == inode:
            raise OSError(code, os.strerror(code))
        return real(hasher, which, length, **options)

    monkeypatch.setattr(module, "hash_into", failing)


def test_an_adopted_copy_is_durable_before_it_counts(
    fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopt.os, "link", _cross_device)
    monkeypatch.setattr(adopt.fcntl, "ioctl", _cross_device)
    synced, folders, real = set[int](), list[Path](), os.fsync

    def fsync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(adopt.os, "fsync", fsync)
    monkeypatch.setattr(adopt, "sync_folder", folders.append)
    fetcher.run(adopt=fetcher.source)
    shards = sorted((fetcher.destination / QUANT).glob("*.gguf"))
    assert {path.stat().st_ino for path in shards} <= synced
    assert folders == [fetcher.destination / QUANT] * 3
