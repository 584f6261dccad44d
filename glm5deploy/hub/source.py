"""What a transport gives a transfer: the bytes of a file from an offset on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from glm5deploy.hub.choice import RemoteFile


@dataclass(frozen=True, slots=True)
class Body:
    """An open answer. ``start`` is where its first byte lies in the file: 0 when the range was ignored or refused."""

    start: int
    etag: str | None
    chunks: Iterator[bytes]


class Source(Protocol):
    """A transport. Iterating the chunks raises :class:`~glm5deploy.hub.faults.TransferFault` for passing faults."""

    @property
    def name(self) -> str: ...

    def offers(self, file: RemoteFile) -> bool:
        """Whether this transport can bring that file at all."""

    def open(self, file: RemoteFile, offset: int, etag: str | None) -> AbstractContextManager[Body]:
        """Bytes from ``offset`` on, if the storage still has the version that ``etag`` names."""

    def renew(self, file: RemoteFile) -> None:
        """Forget where the file was to be had: the next ``open`` asks the hub again."""
