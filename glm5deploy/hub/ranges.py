"""Plain HTTPS: ranged requests to the signed URL that the hub gives for a file."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from urllib.parse import urljoin

import httpx

from glm5deploy.errors import HubError
from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.client import Hub, Location, same_origin, without_query
from glm5deploy.hub.faults import Policy, TransferFault, retry_after
from glm5deploy.hub.plan import FetchPlan
from glm5deploy.hub.source import Body

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_REDIRECTS = 5
_RENEWED = {400, 401, 403, 404, 410}  # what object stores answer to an expired or evicted signed URL


class HttpsSource:
    """Ranged requests through one connection pool, from many threads.

    Signed URLs are asked for once a file and again when they stop working. The token goes to the hub's own origin
    only.
    """

    name = "https"

    def __init__(self, hub: Hub, repo: str, commit: str, policy: Policy) -> None:
        # httpx logs complete URLs at INFO, and a signed URL is a credential.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._hub, self._repo, self._commit, self._policy = hub, repo, commit, policy
        self._locations: dict[str, Location] = {}
        # The read timeout is the silent case of the stall rule; the transfer watches the rate.
        timeout = httpx.Timeout(connect=15.0, read=policy.stall_seconds, write=30.0, pool=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=policy.parallel)
        self._client = httpx.Client(timeout=timeout, limits=limits, follow_redirects=False)

    def __enter__(self) -> HttpsSource:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._client.close()

    def offers(self, file: RemoteFile) -> bool:
        return True

    def renew(self, file: RemoteFile) -> None:
        self._locations.pop(file.path, None)

    @contextmanager
    def open(self, file: RemoteFile, offset: int, etag: str | None) -> Iterator[Body]:
        """See :class:`~glm5deploy.hub.source.Source`; at most ``policy.window`` bytes come in one answer."""
        end = min(file.size, offset + self._policy.window)
        with self._request(file, offset, end, etag) as response:
            start = _checked_start(response, file, offset)
            yield Body(start, response.headers.get("ETag"), _chunks(response))

    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes of a remote file; reads no more than that even if the storage sends more.

        :raises TransferFault: the storage did not give that range.
        """
        with self._request(file, offset, offset + length, None) as response:
            if _checked_start(response, file, offset) != offset:
                raise TransferFault(f"{file.name}: the storage ignores byte ranges")
            data = bytearray()
            for chunk in _chunks(response):
                data += chunk[: length - len(data)]
                if len(data) == length:
                    return bytes(data)
        raise TransferFault(f"{file.name}: {len(data)} bytes of {length} came from offset {offset}")

    @contextmanager
    def _request(self, file: RemoteFile, offset: int, end: int, etag: str | None) -> Iterator[httpx.Response]:
        location = self._locations.get(file.path)
        if location is None:
            location = self._locations[file.path] = self._hub.locate(self._repo, self._commit, file)
        headers = {"Accept-Encoding": "identity", "Range": f"bytes={offset}-{end - 1}"}
        if etag is not None and offset:
            headers["If-Range"] = etag
        url = location.url
        for _ in range(_REDIRECTS):
            own = location.headers if same_origin(url, location.url) else {}
            with _network_faults(), self._client.stream("GET", url, headers={**headers, **own}) as response:
                if response.has_redirect_location:
                    url = urljoin(url, response.headers["Location"])
                    continue
                _refuse(response, offset)
                yield response
                return
        raise TransferFault(f"more than {_REDIRECTS} redirects from {without_query(location.url)}", renew=True)


class RemoteReader:
    """Random access to one remote file by byte ranges, for reading a header without downloading the shard."""

    def __init__(
        self, source: HttpsSource, file: RemoteFile, *, retries: int = 3, policy: Policy | None = None
    ) -> None:
        self._source, self.file, self._retries, self._policy = source, file, retries, policy or Policy()

    def read_at(self, offset: int, length: int) -> bytes:
        """The bytes from ``offset``, fewer than ``length`` only at the end of the file.

        :raises HubError: the range could not be had in several attempts.
        """
        length = max(0, min(length, self.file.size - offset))
        if length == 0:
            return b""
        for attempt in range(self._retries + 1):
            try:
                return self._source.read(self.file, offset, length)
            except TransferFault as fault:
                self._source.renew(self.file)
                if attempt == self._retries:
                    raise HubError(f"{self.file.path}: {fault.reason}", hint="try again later") from fault
                at_once = fault.renew and attempt == 0  # an expired URL
                back_off = 0.0 if at_once else self._policy.wait_after(attempt + 1)
                time.sleep(back_off if fault.wait is None else fault.wait)
        raise AssertionError("unreachable")


@contextmanager
def remote_readers(hub: Hub, plan: FetchPlan, policy: Policy | None = None) -> Iterator[list[RemoteReader]]:
    """A reader for each shard of a plan, in shard order; their ``read_at`` is what ``parse_header`` takes."""
    policy = policy or Policy(parallel=1)
    with HttpsSource(hub, plan.repo, plan.commit, policy) as source:
        yield [RemoteReader(source, file, policy=policy) for file in plan.files]


def _refuse(response: httpx.Response, offset: int) -> None:
    """Raise for every answer that is not the file's bytes. 416 inside a file is a fault, never its end."""
    status = response.status_code
    if status in (200, 206):
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TransferFault("the storage sent a compressed body", renew=True)
        return
    reason = f"the storage answered {status} at byte {offset}"
    raise TransferFault(reason, wait=retry_after(response.headers), renew=status in _RENEWED or status == 416)


def _checked_start(response: httpx.Response, file: RemoteFile, offset: int) -> int:
    """Where the answer begins; its total must be the size that the listing gave."""
    if response.status_code == 200:
        length = response.headers.get("Content-Length", "")
        if length.isdigit() and int(length) != file.size:
            raise TransferFault(f"the storage has {length} bytes, the listing {file.size}", renew=True)
        return 0
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None or int(match[1]) != offset:
        raise TransferFault(f"the storage sent another range than from byte {offset}", renew=True)
    if match[3] not in ("*", str(file.size)):
        raise TransferFault(f"the storage has {match[3]} bytes, the listing {file.size}", renew=True)
    return offset


def _chunks(response: httpx.Response) -> Iterator[bytes]:
    with _network_faults():
        yield from response.iter_raw()


@contextmanager
def _network_faults() -> Iterator[None]:
    try:
        yield
    except httpx.ReadTimeout as error:
        raise TransferFault("the connection went silent", stalled=True) from error
    except httpx.ConnectTimeout as error:
        raise TransferFault("the storage does not accept connections", renew=True) from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise TransferFault(f"the connection broke ({type(error).__name__})") from error
