"""Transfers against a hub that misbehaves, with the real client library."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from glm5deploy.errors import HubError
from glm5deploy.hub.download import Download
from glm5deploy.hub.faults import Policy, RateWatch, TransferFault, retry_after
from glm5deploy.hub.hashing import FileHash, Stopped, differing_spans, prefix_step
from glm5deploy.hub.plan import make_plan, write_plan
from glm5deploy.hub.transfer import Transfer
from tests.hub.conftest import QUANT, REPO, SIZES, STALLS, Fetcher
from tests.support.faulty_hub import Fault, cut, nothing, stall, status, throttle
from tests.support.shard_sets import write_set


def sha_of(fetcher: Fetcher, index: int) -> str:
    return hashlib.sha256(fetcher.originals()[index]).hexdigest()


def test_an_undisturbed_fetch_moves_every_byte_once(fetcher: Fetcher) -> None:
    paths = fetcher.run()
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == fetcher.set_bytes
    assert fetcher.notes == []
    assert sorted(fetcher.proved) == [path.name for path in paths]
    total = [p for p in fetcher.progress if p.task == "total"]
    assert total[-1].done == total[-1].total == fetcher.set_bytes
    again = fetcher.server.served["bytes"]
    fetcher.run()
    assert fetcher.server.served["bytes"] == again


def test_a_cut_body_goes_on_from_its_last_byte(fetcher: Fetcher) -> None:
    fetcher.server.inject(cut(100_000), times=3, match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert {100_000, 200_000, 300_000} <= set(fetcher.server.ranges())
    assert fetcher.server.served["bytes"] == fetcher.set_bytes


def test_windows_split_one_file_into_several_requests(fetcher: Fetcher) -> None:
    fetcher.run(window=500_000)
    assert fetcher.fetched() == fetcher.originals()
    assert {500_000, 1_000_000, 1_500_000} <= set(fetcher.server.ranges())
    assert fetcher.server.served["bytes"] == fetcher.set_bytes


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_passing_errors_of_the_storage_are_tried_again(fetcher: Fetcher, code: int) -> None:
    fetcher.server.inject(status(code), times=2)
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_retry_after_is_obeyed(fetcher: Fetcher) -> None:
    fetcher.server.inject(status(429, Retry_After="1"), match=sha_of(fetcher, 0))
    begun = time.monotonic()
    fetcher.run()
    assert time.monotonic() - begun >= 1.0
    assert any("429" in p.note and "again in 1 s" in p.note for p in fetcher.progress)


def test_passing_errors_of_the_hub_are_tried_again(fetcher: Fetcher) -> None:
    fetcher.plan()

    def overloaded(handler) -> bool:  # type: ignore[no-untyped-def]
        handler.respond_error(503, "Overloaded")
        return True

    fetcher.server.resolve_faults += [overloaded, overloaded]
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_416_inside_a_file_is_not_its_end(fetcher: Fetcher) -> None:
    fetcher.server.inject(cut(50_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(status(416), times=2, match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_an_ignored_range_of_the_same_content_keeps_what_is_there(fetcher: Fetcher) -> None:
    fetcher.server.inject(cut(1_000_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(Fault(ignore_range=True, cut_after=400_000), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    # The whole-file answer broke off below the offset: nothing of the first megabyte was lost.
    assert fetcher.server.ranges().count(1_000_000) == 2


def test_content_changed_under_an_unchanged_name_starts_over(fetcher: Fetcher, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(len(fetcher.originals()[1])))
    fetcher.server.inject(Fault(substitute=other, etag='"old"', cut_after=900_000), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert any("changed in the storage" in note for note in fetcher.notes)


def test_a_wrong_total_is_refused_and_the_url_renewed(fetcher: Fetcher) -> None:
    fetcher.server.inject(Fault(says_total=123), match=sha_of(fetcher, 2))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["resolve"] == len(SIZES) + 1


def test_a_lasting_fault_ends_with_what_is_kept(fetcher: Fetcher) -> None:
    fetcher.server.inject(cut(200_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(status(500), times=50, match=sha_of(fetcher, 1))
    with pytest.raises(
        HubError, match=r"answered 500 at byte 200000, the 5th fault in a row; 200\.0 kB of 1\.5 MB are kept"
    ):
        fetcher.run()
    assert fetcher.partial(2).stat().st_size == 200_000
    assert fetcher.server.forget_faults() == 46


def test_empty_answers_are_faults_not_progress(fetcher: Fetcher) -> None:
    fetcher.server.inject(nothing(), times=2, match=sha_of(fetcher, 0))
    fetcher.run()
    fetcher.server.inject(nothing(), times=5, match=sha_of(fetcher, 0))
    (fetcher.destination / QUANT / "m-00001-of-00003.gguf").unlink()
    with pytest.raises(HubError, match="sent nothing"):
        fetcher.run()


def test_a_partial_of_other_content_is_not_gone_on_with(fetcher: Fetcher) -> None:
    """The same name and size at another commit: only the sidecar tells that these bytes do not belong."""
    fetcher.server.inject(cut(900_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(status(500), times=5, match=sha_of(fetcher, 1))
    with pytest.raises(HubError, match="are kept"):
        fetcher.run(parallel=1)
    fetcher.server.forget_faults()
    write_set(fetcher.source / QUANT, "m", SIZES, seed=5)
    fetcher.server.publish(REPO, fetcher.source)
    write_plan(make_plan(fetcher.hub(), REPO, QUANT, fetcher.destination, refresh=True).plan, fetcher.destination)
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert not any("mismatch" in note for note in fetcher.notes if "m-00002" in note)


def test_an_expired_signed_url_is_renewed_in_mid_transfer(fetcher: Fetcher) -> None:
    fetcher.server.url_lifetime = 0.3
    fetcher.server.pace = 2_000_000
    fetcher.run(window=250_000, parallel=1)
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["resolve"] > len(SIZES)
    assert fetcher.server.served["bytes"] == fetcher.set_bytes


def test_a_silent_connection_is_dropped_and_resumed(fetcher: Fetcher) -> None:
    fetcher.server.inject(stall(700_000), match=sha_of(fetcher, 1))
    begun = time.monotonic()
    fetcher.run(stall_seconds=STALLS)
    assert time.monotonic() - begun < 20
    assert fetcher.fetched() == fetcher.originals()
    assert 700_000 in fetcher.server.ranges()


def test_a_trickling_connection_is_dropped_by_its_rate(fetcher: Fetcher) -> None:
    size = len(fetcher.originals()[1])
    fetcher.server.inject(throttle(size - 15_000, 5_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(throttle(0, 5_000), match=sha_of(fetcher, 1))
    begun = time.monotonic()
    fetcher.run(stall_seconds=STALLS)
    assert fetcher.fetched() == fetcher.originals()
    assert time.monotonic() - begun < 20


def test_wrong_bytes_are_fetched_again_for_this_shard_only(fetcher: Fetcher) -> None:
    fetcher.server.inject(Fault(flip_at=1_234_567), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert fetcher.server.served["bytes"] == fetcher.set_bytes + len(fetcher.originals()[1])
    assert any("hash mismatch" in note for note in fetcher.notes)
    assert any("differed in bytes 1048576-" in note for note in fetcher.notes)
    assert list(fetcher.destination.rglob("*.mismatch")) == []


def test_content_that_is_wrong_twice_is_an_error_and_never_gets_its_name(fetcher: Fetcher) -> None:
    fetcher.server.inject(Fault(flip_at=1_234_567), times=2, match=sha_of(fetcher, 1))
    with pytest.raises(HubError, match="wrong twice") as error:
        fetcher.run()
    assert "--transport" in (error.value.hint or "")
    assert not (fetcher.destination / QUANT / "m-00002-of-00003.gguf").exists()
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert list(fetcher.destination.rglob("*.mismatch")) == []


def test_stopping_keeps_the_bytes_that_came(fetcher: Fetcher) -> None:
    plan = fetcher.plan()
    fetcher.server.pace = 1_000_000
    stop = threading.Event()

    def report(_file: object, done: int, _note: str) -> None:
        if done > 300_000:
            stop.set()

    download = Download(fetcher.hub(), plan, fetcher.destination, fetcher.policy)
    from contextlib import ExitStack

    with ExitStack() as stack:
        sources = download._sources(stack)
        with pytest.raises(Stopped):
            Transfer(fetcher.destination, plan.files[1], sources, fetcher.policy, stop).run(report)
    kept = fetcher.partial(2).stat().st_size
    assert kept >= 300_000
    assert fetcher.partial(2).read_bytes() == fetcher.originals()[1][:kept]


def test_two_processes_do_not_share_a_partial(fetcher: Fetcher) -> None:
    from glm5deploy.errors import DeployError
    from glm5deploy.hub.download import folder_lock

    with folder_lock(fetcher.destination), pytest.raises(DeployError, match="another process is fetching"):
        fetcher.run()


def test_rate_watch_looks_at_the_last_seconds_only() -> None:
    now = [0.0]
    watch = RateWatch(100, 10, clock=lambda: now[0])
    verdicts = []
    for second in range(1, 31):
        now[0] = float(second)
        verdicts.append(watch.add(1000 if second <= 10 else 10))
    assert not any(verdicts[:15])
    assert verdicts[-1]


@pytest.mark.parametrize(
    ("value", "expected"),
    [("7", 7.0), ("99999999", 600.0), ("", None), ("soon", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after(value: str, expected: float | None) -> None:
    assert retry_after({"Retry-After": value}) == expected


def test_backoff_grows_to_its_limit() -> None:
    policy = Policy(backoff=1.0, longest_backoff=8.0)
    for faults, ceiling in ((1, 1), (2, 2), (3, 4), (4, 8), (60, 8)):
        assert ceiling / 2 <= policy.wait_after(faults) <= ceiling


def test_prefix_hashes_are_the_hashes_of_prefixes(fetcher: Fetcher) -> None:
    file = fetcher.plan().files[1]
    content = fetcher.originals()[1]
    hasher = FileHash(file)
    for start in range(0, len(content), 70_001):
        hasher.update(content[start : start + 70_001])
    step = prefix_step(file.size)
    assert hasher.prefixes == [hashlib.sha256(content[:step]).hexdigest()]
    assert hasher.matches()
    assert prefix_step(50_000_000_000) * 1024 >= 50_000_000_000


def test_differing_spans_join_neighbours_and_count_a_longer_tail(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"xxxx" * 10)
    b.write_bytes(b"xxxx" + b"yxxx" * 2 + b"xxxx" * 5)
    assert differing_spans(a, b, block=4) == [(4, 12), (32, 40)]


def test_faults_say_what_they_want() -> None:
    fault = TransferFault("no", wait=3.0, renew=True)
    assert (str(fault), fault.wait, fault.renew, fault.stalled) == ("no", 3.0, True, False)


def test_content_wrong_twice_ends_where_no_first_copy_could_be_kept(
    fetcher: Fetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for two copies must not mean fetching the wrong bytes again and again."""
    monkeypatch.setattr("glm5deploy.hub.partial.free_bytes", lambda _: 0)
    fetcher.server.inject(Fault(flip_at=1_234_567), times=3, match=sha_of(fetcher, 1))
    with pytest.raises(HubError, match="wrong twice"):
        fetcher.run()
    assert list(fetcher.destination.rglob("*.mismatch")) == []
    with pytest.raises(HubError, match="wrong twice"):  # another process: the sidecar remembers
        fetcher.run()
    assert fetcher.server.forget_faults() == 0
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()


def test_starting_over_from_byte_0_has_an_end(fetcher: Fetcher) -> None:
    """A proxy that ignores ranges and changes its ETag brings bytes each time, and never the file."""
    for number in range(20):
        fault = Fault(ignore_range=True, etag=f'"{number}"', cut_after=900_000)
        fetcher.server.inject(fault, match=sha_of(fetcher, 1))
    with pytest.raises(HubError, match="began it from byte 0 5 times"):
        fetcher.run(parallel=1)
    assert fetcher.server.forget_faults() == 14


def test_a_range_of_other_content_is_not_appended(fetcher: Fetcher, tmp_path: Path) -> None:
    """The storage has the new content now, and honours the range without looking at If-Range."""
    other = tmp_path / "other"
    other.write_bytes(bytes(len(fetcher.originals()[1])))
    fetcher.server.inject(Fault(substitute=other, etag='"old"', cut_after=900_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(Fault(ignore_if_range=True), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert any("changed in the storage" in note for note in fetcher.notes)
    assert not any("hash mismatch" in note for note in fetcher.notes)


def test_a_fault_after_starting_over_keeps_the_hash_right(fetcher: Fetcher, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(len(fetcher.originals()[1])))
    fetcher.server.inject(Fault(substitute=other, etag='"old"', cut_after=900_000), match=sha_of(fetcher, 1))
    fetcher.server.inject(cut(400_000), match=sha_of(fetcher, 1))
    fetcher.run()
    assert fetcher.fetched() == fetcher.originals()
    assert not any("hash mismatch" in note for note in fetcher.notes)
