"""Xet storage with the real hf_xet: a store in a folder stands for the service, the hub hands out its address."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hf_xet
import pytest

from glm5deploy.demo.hub_repository import Blob
from glm5deploy.errors import DeployError
from glm5deploy.hub.faults import TransferFault
from glm5deploy.hub.xet import watched, xet_available
from tests.hub.conftest import QUANT, REPO, STALLS, Fetcher


@pytest.fixture
def stored(fetcher: Fetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetcher:
    """The set uploaded to a xet store, its files published with their xet hashes."""
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "cache"))
    store = tmp_path / "store"
    store.mkdir()
    endpoint = f"local://{store}"
    files = sorted((fetcher.source / QUANT).iterdir())
    with hf_xet.XetSession().new_upload_commit(endpoint=endpoint) as commit:
        uploads = [commit.start_upload_file(str(path)) for path in files]
    blobs = {
        f"{QUANT}/{path.name}": Blob(path, path.stat().st_size, upload.result().xet_info.hash)
        for path, upload in zip(files, uploads, strict=True)
    }
    fetcher.server.xet_endpoint = endpoint
    fetcher.server.repository(REPO).publish(blobs, ref="main")
    return fetcher


def test_xet_brings_the_set_without_the_storage(stored: Fetcher) -> None:
    stored.run(transport="auto")
    assert stored.fetched() == stored.originals()
    assert stored.server.served["blob"] == 0
    assert stored.notes == []


def test_https_can_be_chosen(stored: Fetcher) -> None:
    stored.run(transport="https")
    assert stored.fetched() == stored.originals()
    assert stored.server.served["bytes"] == stored.set_bytes


def test_hf_hub_disable_xet_is_honoured(stored: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    assert not xet_available()
    stored.run(transport="auto")
    assert stored.server.served["bytes"] == stored.set_bytes
    (stored.destination / QUANT / "m-00001-of-00003.gguf").unlink()
    with pytest.raises(DeployError, match="xet is not available"):
        stored.run(transport="xet")


def test_a_partial_from_https_goes_on_over_xet(stored: Fetcher) -> None:
    """Both transports share the partial: bytes that are wrong in it would fail the hash."""
    plan = stored.plan()
    from glm5deploy.hub.partial import Partial

    partial = Partial(stored.destination, plan.files[1])
    partial.append(stored.originals()[1][:1_000_003])
    partial.close()
    stored.run(transport="xet")
    assert stored.fetched() == stored.originals()
    assert stored.notes == []


def test_a_failing_xet_store_is_left_for_https(stored: Fetcher) -> None:
    stored.server.xet_endpoint = "http://127.0.0.1:9"
    stored.run(transport="auto", stall_seconds=STALLS, retries=6)
    assert stored.fetched() == stored.originals()
    assert stored.server.served["bytes"] == stored.set_bytes
    assert any("going on over https" in note for note in stored.notes)


def test_the_xet_token_is_asked_of_the_hub_alone(stored: Fetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refresh route on another host would carry the user's token there."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    stored.server.xet_route_host = "http://127.0.0.1:9"
    stored.run(transport="auto")
    assert stored.fetched() == stored.originals()
    assert stored.server.served["bytes"] == stored.set_bytes
    assert any("another host than the hub" in note for note in stored.notes)


def test_nothing_is_kept_twice(stored: Fetcher, tmp_path: Path) -> None:
    stored.run(transport="xet")
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert kept < stored.set_bytes / 4


def test_a_silent_stream_is_given_up() -> None:
    released = threading.Event()

    def silent() -> Iterator[bytes]:
        yield b"first"
        released.wait(30)  # like a native call that does not return

    chunks = watched(silent(), 0.3)
    assert next(chunks) == b"first"
    begun = time.monotonic()
    with pytest.raises(TransferFault) as fault:
        next(chunks)
    assert time.monotonic() - begun < 20
    released.set()
    assert fault.value.stalled


def test_an_abandoned_stream_frees_its_reader() -> None:
    before = threading.active_count()
    chunks = watched(itertools.repeat(b"x" * 1000), 5)
    assert next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    for _ in range(50):
        if threading.active_count() <= before:
            break
        time.sleep(0.05)
    assert threading.active_count() <= before
