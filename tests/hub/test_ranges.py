"""Byte ranges of remote shards, without downloading them."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import pytest

from glm5deploy.errors import HubError
from glm5deploy.gguf_files.header import parse_header
from glm5deploy.hub.client import Hub
from glm5deploy.hub.plan import make_plan
from glm5deploy.hub.ranges import remote_readers
from tests.hub.conftest import QUANT, QUICK, REPO, Fetcher
from tests.support.data import SET_A
from tests.support.faulty_hub import Fault, cut, status


def test_ranges_are_exact(fetcher: Fetcher) -> None:
    content = fetcher.originals()[1]
    with remote_readers(fetcher.hub(), fetcher.plan()) as readers:
        read_at = readers[1].read_at
        assert read_at(0, 4) == b"GGUF"
        assert read_at(777_777, 1000) == content[777_777:778_777]
        assert read_at(len(content) - 10, 100) == content[-10:]
        assert read_at(len(content), 5) == b""
        assert read_at(len(content) + 7, 5) == b""
    assert fetcher.server.served["bytes"] == 4 + 1000 + 10


def test_headers_of_a_remote_set_cost_little(fetcher: Fetcher) -> None:
    fetcher.server.publish("tiny/A-GGUF", SET_A / "GLM-tiny-A-GGUF")
    plan = make_plan(fetcher.hub(), "tiny/A-GGUF", QUANT, fetcher.destination).plan
    with remote_readers(fetcher.hub(), plan, QUICK) as readers:
        headers = [parse_header(r.read_at, r.file.size, r.file.name) for r in readers]
    assert headers[0].metadata["general.architecture"] == "glm-dsa"
    assert sum(len(h.tensors) for h in headers) == headers[0].metadata["split.tensors.count"]
    assert fetcher.server.served["bytes"] < plan.size / 4


def test_faults_are_tried_again_a_few_times(fetcher: Fetcher) -> None:
    sha = hashlib.sha256(fetcher.originals()[0]).hexdigest()
    plan = fetcher.plan()
    for fault in (status(503), cut(10), Fault(says_total=7)):
        fetcher.server.inject(fault, match=sha)
    with remote_readers(fetcher.hub(), plan, QUICK) as readers:
        assert readers[0].read_at(100, 1000) == fetcher.originals()[0][100:1100]
        fetcher.server.inject(status(500), times=4, match=sha)
        with pytest.raises(HubError, match="answered 500"):
            readers[0].read_at(0, 10)


def test_a_storage_without_ranges_is_not_read_to_the_end(fetcher: Fetcher) -> None:
    sha = hashlib.sha256(fetcher.originals()[1]).hexdigest()
    fetcher.server.inject(Fault(ignore_range=True), times=4, match=sha)
    with (
        remote_readers(fetcher.hub(), fetcher.plan(), QUICK) as readers,
        pytest.raises(HubError, match="ignores byte ranges"),
    ):
        readers[1].read_at(500_000, 10)


def test_offline_asks_nobody(fetcher: Fetcher) -> None:
    plan = fetcher.plan()
    asked = len(fetcher.server.requests)
    with (
        remote_readers(Hub(endpoint=fetcher.server.endpoint, offline=True), plan) as readers,
        pytest.raises(HubError, match="working offline"),
    ):
        readers[0].read_at(0, 4)
    assert len(fetcher.server.requests) == asked
    assert plan.repo == REPO


def test_retry_after_is_obeyed(fetcher: Fetcher) -> None:
    sha = hashlib.sha256(fetcher.originals()[0]).hexdigest()
    fetcher.server.inject(status(429, Retry_After="1"), match=sha)
    with remote_readers(fetcher.hub(), fetcher.plan(), QUICK) as readers:
        begun = time.monotonic()
        assert readers[0].read_at(0, 4) == b"GGUF"
        assert time.monotonic() - begun >= 1.0


def test_an_overloaded_storage_is_not_asked_again_at_once(fetcher: Fetcher) -> None:
    sha = hashlib.sha256(fetcher.originals()[0]).hexdigest()
    fetcher.server.inject(status(503), match=sha)
    with remote_readers(fetcher.hub(), fetcher.plan(), replace(QUICK, backoff=1.0)) as readers:
        begun = time.monotonic()
        assert readers[0].read_at(0, 4) == b"GGUF"
        assert time.monotonic() - begun >= 0.5
