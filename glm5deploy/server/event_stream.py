"""The data of server-sent events, in whatever pieces their bytes arrive.

By the standard's rules for ``text/event-stream``: a line ends at CR, LF or CRLF and nowhere else. What httpx and
``str.splitlines`` also take for an end (U+0085, U+2028 and alike) stands in the text of models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx

_DONE = "[DONE]"


class EventReader:
    """Fed a stream's bytes, gives the data of every event as it is complete; an unfinished one at the end is none."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._first = True
        self._after_return = False

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that ``piece`` completes. Raises UnicodeDecodeError, a ValueError, for bytes that are no
        UTF-8: replaced characters would be a wrong answer.
        """
        if not piece:
            return []
        if self._after_return:  # the line has ended already, lest an event waits for the next piece
            piece = piece.removeprefix(b"\n")
        self._after_return = piece.endswith(b"\r")
        found = []
        for part in piece.splitlines(keepends=True):  # of bytes: at CR, LF and CRLF only
            self._line += part
            if part.endswith((b"\r", b"\n")):
                line = self._line.rstrip(b"\r\n")
                self._line.clear()
                found += self._take(line.removeprefix(b"\xef\xbb\xbf") if self._first else line)
                self._first = False
        return found

    def _take(self, line: bytearray) -> list[str]:
        if not line:
            data, self._data = self._data, []
            return ["\n".join(data)] if data else []
        name, _, value = line.decode().partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return []


class _Answer:
    """Events of an OpenAI-compatible stream, which says when it is over."""

    def __init__(self) -> None:
        self._reader, self._done = EventReader(), False

    def feed(self, piece: bytes) -> list[str]:
        found = self._reader.feed(piece)
        self._done = self._done or _DONE in found
        return [data for data in found if data != _DONE]

    def end(self) -> None:
        if not self._done:
            raise ValueError(f"it ended without {_DONE}")


def answer_events(response: httpx.Response) -> Iterator[str]:
    """Data of each event of a streamed answer, without the last, "[DONE]". Raises ValueError when that never came, or
    for bytes that are no UTF-8."""
    answer = _Answer()
    for piece in response.iter_bytes():
        yield from answer.feed(piece)
    answer.end()


async def answer_events_async(response: httpx.Response) -> AsyncIterator[str]:
    """The same of a response to an ``httpx.AsyncClient``."""
    answer = _Answer()
    async for piece in response.aiter_bytes():
        for data in answer.feed(piece):
            yield data
    answer.end()
