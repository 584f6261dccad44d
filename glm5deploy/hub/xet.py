"""Xet storage through hf_xet: its ordered byte stream takes a start, so a shard resumes there as it does over HTTPS.

hf_xet's file download restarts a file from zero and has no rate rule; the stream has neither drawback: the bytes go
through the same partial file, hash and stall watch as those of plain HTTPS.
"""

from __future__ import annotations

import importlib.util
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from glm5deploy.hub.choice import RemoteFile
from glm5deploy.hub.client import Hub, Location, same_origin
from glm5deploy.hub.faults import Policy, TransferFault
from glm5deploy.hub.source import Body

_PATIENCE = 4
"""Times the stall rule's seconds without a chunk: one is up to 64 MB and comes whole. A line on which that takes longer
is better served by ranges."""
_TRUE = {"1", "ON", "YES", "TRUE"}
_CONFIG = {
    "chunk_cache.size_bytes": 0,  # would keep everything a second time on disk
    "shard.cache_size_limit": 1 << 30,
    "client.read_timeout": timedelta(seconds=60),
    # hf_xet's own bounds are 1.6 GB a process and up to 6.3 GB for several files.
    "reconstruction.download_buffer_size": 64 << 20,
    "reconstruction.download_buffer_perfile_size": 32 << 20,
    "reconstruction.download_buffer_limit": 192 << 20,
    "reconstruction.min_prefetch_buffer": 32 << 20,
    "reconstruction.min_reconstruction_fetch_size": 16 << 20,
    "reconstruction.max_reconstruction_fetch_size": 32 << 20,
}


def xet_available() -> bool:
    """hf_xet is installed and HF_HUB_DISABLE_XET is not set."""
    disabled = os.environ.get("HF_HUB_DISABLE_XET", "").upper() in _TRUE
    return not disabled and importlib.util.find_spec("hf_xet") is not None


class XetSource:
    """Byte streams out of xet storage. Read tokens come from the hub, are short-lived and renewed by hf_xet."""

    name = "xet"

    def __init__(self, hub: Hub, repo: str, commit: str, policy: Policy) -> None:
        from hf_xet import XetConfig, XetSession  # type: ignore[import-untyped]  # no stubs

        self._hub, self._repo, self._commit, self._policy = hub, repo, commit, policy
        self._session = XetSession(XetConfig().with_config(_CONFIG))
        self._locations: dict[str, Location] = {}

    def offers(self, file: RemoteFile) -> bool:
        return file.xet_hash is not None

    def renew(self, file: RemoteFile) -> None:
        self._locations.pop(file.path, None)

    @contextmanager
    def open(self, file: RemoteFile, offset: int, etag: str | None) -> Iterator[Body]:
        """See :class:`~glm5deploy.hub.source.Source`. Content is addressed by its hash: there is no ETag."""
        from hf_xet import XetFileInfo

        location = self._locations.get(file.path)
        if location is None:
            location = self._locations[file.path] = self._hub.locate(self._repo, self._commit, file)
        if location.xet_hash is None or location.xet_refresh is None:
            raise TransferFault("the hub no longer offers this file through xet", stalled=True)
        if not same_origin(location.xet_refresh, self._hub.endpoint):
            raise TransferFault("the xet token is to be had from another host than the hub", stalled=True)
        token = self._hub.token
        try:
            group = self._session.new_download_stream_group(
                token_refresh_url=location.xet_refresh,
                token_refresh_headers={"Authorization": f"Bearer {token}"} if token else {},
            )
            stream = group.download_stream(XetFileInfo(location.xet_hash, file.size), start=offset, end=file.size)
        except _ERRORS as error:
            raise TransferFault(f"xet storage cannot be reached ({type(error).__name__})", renew=True) from error
        try:
            yield Body(offset, None, watched(stream, _PATIENCE * self._policy.stall_seconds))
        finally:
            group.abort()  # also unblocks the reader; the stream itself cannot be cancelled while it is being read


_ERRORS: tuple[type[Exception], ...] = (OSError, RuntimeError, ValueError, KeyError)


def watched(stream: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """The stream's chunks, read by a thread of its own: native code that blocks for ever cannot be interrupted.

    Who closes this iterator also aborts the stream's group, which ends the reader.

    :raises TransferFault: no chunk for ``seconds``, or the stream failed.
    """
    chunks: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
    # A chunk is up to 64 MB: the reader asks for the next one when this one is on disk; hf_xet prefetches by itself.
    wanted, given_up = threading.Semaphore(0), threading.Event()

    def put(item: bytes | Exception | None) -> bool:
        chunks.put(item)
        wanted.acquire()
        return not given_up.is_set()

    threading.Thread(target=_drain, args=(stream, put), daemon=True, name="xet stream").start()
    try:
        while True:
            try:
                item = chunks.get(timeout=seconds)
            except queue.Empty:
                raise TransferFault("xet went silent", stalled=True) from None
            if item is None:
                return
            if isinstance(item, Exception):
                raise TransferFault(f"xet failed ({type(item).__name__})", renew=True) from item
            yield item
            del item
            wanted.release()
    finally:
        given_up.set()
        wanted.release()


def _drain(stream: Iterable[bytes], put: Callable[[bytes | Exception | None], bool]) -> None:
    try:
        for chunk in stream:
            if not put(chunk):
                return
    except _ERRORS as error:
        put(error)
    else:
        put(None)
