"""The loopback hub with the misbehaviour that users report: each fault is one answer of the blob storage.

``hub.inject(cut(1000), times=3)`` makes the next three ranged requests break off after 1,000 body bytes. Faults are
used up in the order in which they were given; ``match`` restricts one to requests for some blobs.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from glm5deploy.demo.hub_handler import HubHandler
from glm5deploy.demo.hub_repository import Blob
from glm5deploy.demo.local_hub import LocalHub

_SLICE = 16 * 1024


@dataclass
class Fault:
    """What one blob request meets. ``answer`` replaces the whole answer; the others alter the body being sent."""

    answer: Callable[[FaultyHandler, Blob], None] | None = None
    cut_after: int | None = None
    stall_after: int | None = None
    slow_after: int | None = None
    bytes_per_second: int = 0
    flip_at: int | None = None
    ignore_range: bool = False
    ignore_if_range: bool = False
    etag: str | None = None
    substitute: Path | None = None
    says_total: int | None = None


def cut(after: int) -> Fault:
    """The connection breaks after ``after`` bytes of the body."""
    return Fault(cut_after=after)


def stall(after: int) -> Fault:
    """Nothing more comes after ``after`` bytes, and the connection stays open."""
    return Fault(stall_after=after)


def throttle(after: int, bytes_per_second: int) -> Fault:
    """Full speed for ``after`` bytes of the body, then a trickle."""
    return Fault(slow_after=after, bytes_per_second=bytes_per_second)


def status(code: int, **headers: str) -> Fault:
    """An error answer, for example ``status(429, Retry_After="1")``."""

    def answer(handler: FaultyHandler, _: Blob) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.respond_error(HTTPStatus(code), "Fault", named)

    return Fault(answer=answer)


def nothing() -> Fault:
    """A well-formed answer to the range that was asked for, with no byte in it."""

    def answer(handler: FaultyHandler, blob: Blob) -> None:
        start = handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0]
        handler.send_response(HTTPStatus.PARTIAL_CONTENT)
        handler.send_header("Content-Range", f"bytes {start}-{blob.size - 1}/{blob.size}")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"0\r\n\r\n")

    return Fault(answer=answer)


class FaultyHub(LocalHub):
    """``requests`` lists (kind, path, headers) of everything asked; ``pace`` limits every body in bytes a second; at
    ``most`` served bytes in all every body is held, and given up once the limit is lifted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(handler=FaultyHandler, **options)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.pace = 0
        self.most: int | None = None
        self.xet_route_host: str | None = None
        self.resolve_faults: list[Callable[[FaultyHandler], bool]] = []
        self.api_faults: list[Callable[[FaultyHandler], bool]] = []
        self.closing = threading.Event()
        self._faults: list[tuple[Fault, str | None]] = []
        self._sending = 0

    def sending(self, change: int) -> None:
        with self.lock:
            self._sending += change

    def wait_idle(self) -> None:
        """Until no body is being sent: what was ``served`` of one that its reader gave up is then what was sent."""
        limit = time.monotonic() + 30
        while self._sending:
            assert time.monotonic() < limit, "a body is still being sent"
            time.sleep(0.01)

    @property
    def holds(self) -> bool:
        return self.most is not None and self.served["bytes"] >= self.most and not self.closing.is_set()

    def inject(self, fault: Fault, *, times: int = 1, match: str | None = None) -> None:
        """``match``: a blob's sha256 that the fault waits for."""
        with self.lock:
            self._faults += [(fault, match)] * times

    def forget_faults(self) -> int:
        """Drop the faults that were not met; returns how many there were."""
        with self.lock:
            count = len(self._faults)
            self._faults.clear()
        return count

    def take(self, sha256: str) -> Fault | None:
        with self.lock:
            for entry in self._faults:
                if entry[1] in (None, sha256):
                    self._faults.remove(entry)
                    return entry[0]
        return None

    def ranges(self) -> list[int]:
        """First bytes of all ranged blob requests, in order."""
        asked = [headers.get("Range", "bytes=0-") for kind, _, headers in self.requests if kind == "blob"]
        return [int(value.removeprefix("bytes=").partition("-")[0]) for value in asked]

    def stop(self) -> None:
        self.closing.set()
        super().stop()


class FaultyHandler(HubHandler):
    hub: FaultyHub
    fault: Fault | None = None

    def setup(self) -> None:
        # Small buffers: what was sent and never read would blur the count of bytes served.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        super().setup()

    def do_GET(self) -> None:
        kind = "blob" if self.path.startswith("/blobs/") else "resolve" if "/resolve/" in self.path else "api"
        with self.hub.lock:
            self.hub.requests.append((kind, self.path, dict(self.headers)))
        faults = {"resolve": self.hub.resolve_faults, "api": self.hub.api_faults}.get(kind, [])
        if faults and faults.pop(0)(self):
            return
        super().do_GET()

    def respond_blob(self, sha256: str, query: str) -> None:
        self.fault = self.hub.take(sha256)
        blob = self.hub.blob(sha256)
        if self.fault is not None and self.fault.answer is not None and blob is not None:
            self.fault.answer(self, blob)
            return
        super().respond_blob(sha256, query)

    def send_range(self, blob: Blob, etag: str, headers: dict[str, str]) -> None:
        fault = self.fault
        if fault is not None:
            etag = fault.etag or etag
            if fault.substitute is not None:
                blob = Blob(fault.substitute, fault.substitute.stat().st_size)
            if fault.ignore_range:
                del self.headers["Range"]
            if fault.ignore_if_range:
                del self.headers["If-Range"]
            if fault.says_total is not None:
                headers = {**headers, "X-Claimed": str(fault.says_total)}
        super().send_range(blob, etag, headers)

    def send_header(self, keyword: str, value: str) -> None:
        if self.fault is not None and self.fault.says_total is not None and keyword == "Content-Range":
            value = f"{value.partition('/')[0]}/{self.fault.says_total}"
        if self.hub.xet_route_host and keyword == "X-Xet-Refresh-Route":
            value = value.replace(self.hub.endpoint, self.hub.xet_route_host)
        super().send_header(keyword, value)

    def send_body(self, blob: Blob, start: int, end: int) -> None:
        self.hub.sending(1)
        try:
            if self.fault is None and not self.hub.pace:
                super().send_body(blob, start, end)
            else:
                self._send_slices(blob, start, end, self.fault or Fault())
        finally:
            self.hub.sending(-1)

    def _send_slices(self, blob: Blob, start: int, end: int, fault: Fault) -> None:
        sent = 0
        with blob.source.open("rb") as file:
            file.seek(start)
            while start + sent < end:
                if self.hub.holds:
                    while self.hub.holds:
                        time.sleep(0.005)
                    self.close_connection = True
                    return
                data = bytearray(file.read(min(end - start - sent, *self._stops(fault, sent))))
                if fault.flip_at is not None and 0 <= fault.flip_at - start - sent < len(data):
                    data[fault.flip_at - start - sent] ^= 0x55
                self.hub.count("bytes", len(data))  # before a client that has them can ask for the count
                self.wfile.write(data)
                sent += len(data)
                self._misbehave(fault, sent, len(data))
                if self.close_connection:
                    return

    def _stops(self, fault: Fault, sent: int) -> list[int]:
        """How much may be sent before something happens; a trickle is many small pieces, not a few late large ones."""
        trickles = fault.slow_after is not None and sent >= fault.slow_after
        limits = (fault.cut_after, fault.stall_after, fault.slow_after)
        step = max(1, fault.bytes_per_second // 20) if trickles else _SLICE
        return [step, *(limit - sent for limit in limits if limit is not None and limit > sent)]

    def _misbehave(self, fault: Fault, sent: int, count: int) -> None:
        if fault.cut_after is not None and sent >= fault.cut_after:
            self.close_connection = True
        elif fault.stall_after is not None and sent >= fault.stall_after:
            self.hub.closing.wait(60)
            self.close_connection = True
        elif fault.slow_after is not None and sent >= fault.slow_after:
            time.sleep(count / fault.bytes_per_second)
        elif self.hub.pace:
            time.sleep(count / self.hub.pace)
