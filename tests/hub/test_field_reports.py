"""What users report about downloading large GGUF sets, one test a report (numbers of the field notes' table 2a)."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from glm5deploy.errors import DiskFullError, UsageError
from glm5deploy.hub import disk
from glm5deploy.hub.choice import choose_set, group_sets
from glm5deploy.hub.plan import make_plan
from glm5deploy.hub.verify import verify
from glm5deploy.hub.xet import _CONFIG
from tests.hub.conftest import QUANT, REPO, SIZES, STALLS, Fetcher
from tests.support.faulty_hub import Fault, cut, stall, status, throttle
from tests.support.shard_sets import write_set


def sha_of(fetcher: Fetcher, index: int) -> str:
    return hashlib.sha256(fetcher.originals()[index]).hexdigest()


def test_f1_a_truncated_file_is_never_called_complete(fetcher: Fetcher) -> None:
    """Exit 0 with truncated files after a spurious 416: here 416 and cuts still end in whole files."""
    fetcher.server.inject(cut(1_000_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(status(416), match=sha_of(fetcher, 1))
    fetcher.server.inject(cut(100_000), match=sha_of(fetcher, 1))
    paths = fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    os.truncate(paths[1], 1_000_000)
    assert [v.problem for v in verify(fetcher.plan(), fetcher.destination)] == ["", "size", ""]
    served = fetcher.server.served["bytes"]
    fetcher.run()
    assert fetcher.server.served["bytes"] - served == len(fetcher.originals()[1])


def test_f2_f5_f14_a_hang_near_the_end_is_broken_off_and_resumed(fetcher: Fetcher) -> None:
    """Downloads that hang at 98-99 %: twice silent at the very end, and the set still arrives within seconds."""
    size = len(fetcher.originals()[1])
    fetcher.server.inject(stall(size - 1000), match=sha_of(fetcher, 1))
    fetcher.server.inject(stall(500), match=sha_of(fetcher, 1))
    begun = time.monotonic()
    fetcher.run(stall_seconds=STALLS)
    assert time.monotonic() - begun < 20
    assert fetcher.fetched() == fetcher.originals()
    assert {size - 1000, size - 500} <= set(fetcher.server.ranges())


def test_f3_one_worker_without_xet_hangs_no_longer_either(fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    for index in range(len(SIZES)):
        fetcher.server.inject(stall(200_000), match=sha_of(fetcher, index))
    fetcher.run(parallel=1, transport="auto", stall_seconds=STALLS)
    assert fetcher.fetched() == fetcher.originals()


def test_f4_a_rate_that_decays_in_the_last_percent_counts_as_a_stall(fetcher: Fetcher) -> None:
    """Bytes keep coming, so that a rule on silence alone would wait for ever."""
    size = len(fetcher.originals()[1])
    last_percent = size - size // 100
    fetcher.server.inject(throttle(last_percent, 500), match=sha_of(fetcher, 1))
    begun = time.monotonic()
    fetcher.run(stall_seconds=STALLS)
    assert time.monotonic() - begun < 20  # at 500 B/s the tail alone would take 30 s
    assert fetcher.fetched() == fetcher.originals()


def test_f6_an_incomplete_file_in_place_is_not_taken_for_complete(fetcher: Fetcher) -> None:
    target = fetcher.destination / QUANT / "m-00002-of-00003.gguf"
    target.parent.mkdir(parents=True)
    target.write_bytes(fetcher.originals()[1][:-5000])
    plan = fetcher.plan()
    assert verify(plan, fetcher.destination)[1].problem == "size"
    padded = target.with_name("m-00003-of-00003.gguf")
    padded.write_bytes(fetcher.originals()[2][:-5000] + bytes(5000))
    assert verify(plan, fetcher.destination)[2].problem == "hash"
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_f7_the_disk_is_asked_first_and_no_cache_doubles_the_use(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _CONFIG["chunk_cache.size_bytes"] == 0
    fetcher.run()
    on_disk = sum(p.stat().st_size for p in fetcher.destination.rglob("*") if p.is_file())
    assert on_disk < fetcher.set_bytes * 1.01
    (fetcher.destination / QUANT / "m-00001-of-00003.gguf").unlink()
    monkeypatch.setattr(disk, "free_bytes", lambda _: 1000)
    with pytest.raises(DiskFullError, match="still to be fetched"):
        fetcher.run()


def test_f8_an_interrupted_download_does_not_start_from_zero(fetcher: Fetcher) -> None:
    """Resumed in another run (another process in test_processes): only the missing bytes are served."""
    size = len(fetcher.originals()[1])
    fetcher.server.inject(cut(size * 6 // 10), match=sha_of(fetcher, 1))
    fetcher.server.inject(status(500), times=9, match=sha_of(fetcher, 1))
    with pytest.raises(Exception, match="are kept"):
        fetcher.run(retries=2, parallel=1)
    fetcher.server.forget_faults()
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == fetcher.set_bytes


def test_f10_a_branch_that_moves_during_the_download_does_not_mix_commits(fetcher: Fetcher) -> None:
    """Same names, same sizes, other bytes: a length check would not notice."""
    wanted = fetcher.originals()
    moved = []

    def move(_handler: object) -> bool:
        if not moved:
            write_set(fetcher.source.parent / "newer" / QUANT, "m", SIZES, seed=99)
            moved.append(fetcher.server.publish(REPO, fetcher.source.parent / "newer"))
        return False

    fetcher.plan()
    fetcher.server.resolve_faults.append(move)
    fetcher.run()
    assert moved
    assert fetcher.fetched() == wanted
    assert any(moved[0][:12] in n for n in make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination).notices)


def test_f10_bytes_of_another_commit_under_the_pinned_name_are_not_stored(fetcher: Fetcher, tmp_path: Path) -> None:
    other = write_set(tmp_path / "newer" / QUANT, "m", SIZES, seed=99)[1]
    fetcher.server.inject(Fault(substitute=other), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert any("hash mismatch" in note for note in fetcher.notes)


def test_f13_quantisations_in_folders_whose_names_contain_one_another(fetcher: Fetcher) -> None:
    write_set(fetcher.source / "Q4_K_XL", "m-Q4_K_XL", [1000, 1000])
    fetcher.server.publish(REPO, fetcher.source)
    sets = group_sets(fetcher.hub().files_of(REPO, fetcher.server.repositories[REPO].refs["main"]))
    assert {file.path.split("/")[0] for file in choose_set(sets, "Q4_K_XL", REPO).files} == {"Q4_K_XL"}
    assert {file.path.split("/")[0] for file in choose_set(sets, "UD-Q4_K_XL", REPO).files} == {"UD-Q4_K_XL"}
    with pytest.raises(UsageError):
        choose_set(sets, "K_XL", REPO)
