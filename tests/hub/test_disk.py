"""Room on disk, before and during a transfer."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from glm5deploy.errors import DeployError, DiskFullError
from glm5deploy.hub import disk
from tests.hub.conftest import QUANT, Fetcher


def test_what_does_not_fit_is_refused_before_the_first_byte(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 3_000_000)
    monkeypatch.setattr(disk, "_MOST_SLACK", 0)
    with pytest.raises(
        DiskFullError, match=r"has 3\.0 MB free; 2\.5 MB are still to be fetched and 2\.5 MB for the merge"
    ):
        fetcher.run(later_bytes=fetcher.set_bytes)
    assert fetcher.server.served["bytes"] == 0
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_only_what_is_missing_counts(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = fetcher.run()
    paths[0].unlink()
    monkeypatch.setattr(disk, "_MOST_SLACK", 0)
    monkeypatch.setattr(disk, "free_bytes", lambda _: len(fetcher.originals()[0]))
    fetcher.run()
    monkeypatch.setattr(disk, "free_bytes", lambda _: 0)
    fetcher.run()


def test_a_full_disk_in_mid_transfer_keeps_the_partials(fetcher: Fetcher) -> None:
    """The kernel's own ENOSPC: the second shard's partial leads to a device that is always full."""
    partial = fetcher.partial(2)
    fetcher.plan()
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="is full") as error:
        fetcher.run(parallel=1)
    assert str(fetcher.destination) in error.value.message
    assert "are still to be fetched" in error.value.message
    assert "are free" in error.value.message
    assert "run fetch again" in (error.value.hint or "")
    assert (fetcher.destination / QUANT / "m-00001-of-00003.gguf").is_file()
    partial.unlink()
    fetcher.server.wait_idle()
    served = fetcher.server.served["bytes"]
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == served + sum(len(content) for content in fetcher.originals()[1:])


def test_other_write_errors_name_the_path(tmp_path: Path) -> None:
    error = disk.explain_write_error(PermissionError(errno.EACCES, "Permission denied", "/x/y"), tmp_path, 5)
    assert type(error) is DeployError
    assert error.message == "cannot write /x/y: Permission denied"
    quota = disk.explain_write_error(OSError(errno.EDQUOT, "Disk quota exceeded"), tmp_path, 5)
    assert "has reached your quota" in quota.message


def test_file_systems_of_paths_that_do_not_exist_yet(tmp_path: Path) -> None:
    assert disk.same_file_system(tmp_path / "a" / "b", tmp_path)
    assert not disk.same_file_system(tmp_path / "a", Path("/proc/x"))
    assert disk.free_bytes(tmp_path / "no" / "such") > 0
