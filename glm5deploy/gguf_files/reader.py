"""Bytes from the front of a file or an HTTP range, fetched as a parser asks for them and never past what can exist."""

from __future__ import annotations

import struct
from collections.abc import Callable

from glm5deploy.errors import FileFormatError

#: ``read_at(offset, length)`` returns up to ``length`` bytes; fewer only where nothing more is there (yet).
ReadAt = Callable[[int, int], bytes]

#: Real headers reach 20 MB (GLM-5's vocabulary and merges); a longer one is a length field gone wrong.
MAX_HEADER_BYTES = 256 << 20
_FIRST_READ = 64 << 10
_LARGEST_READ = 8 << 20
_U64 = struct.Struct("<Q")


class HeaderIncompleteError(FileFormatError):
    """The bytes at hand end before the header does; at least ``needed`` bytes from the file's start are necessary."""

    def __init__(self, message: str, *, needed: int) -> None:
        super().__init__(message, hint="the file is still being written or was cut: fetch it again")
        self.needed = needed


class ByteReader:
    """A cursor over the first bytes of a file of ``size`` bytes called ``name`` in errors."""

    def __init__(self, read_at: ReadAt, size: int, name: str) -> None:
        self._read_at = read_at
        self.size = size
        self.name = name
        self.buffer = bytearray()
        self.position = 0

    def error(self, at: int, message: str, *, hint: str | None = None) -> FileFormatError:
        return FileFormatError(f"{self.name}: at offset {at}: {message}", hint=hint)

    def require(self, length: int, what: str) -> None:
        """Make the next ``length`` bytes available in ``buffer``; ``what`` names them if they cannot be."""
        end = self.position + length
        if end <= len(self.buffer):
            return
        if end > self.size:
            raise self.error(
                self.position,
                f"{what} needs {length} bytes, but the file ends at {self.size}",
                hint="the file is cut or damaged: fetch it again",
            )
        if end > MAX_HEADER_BYTES:
            raise self.error(self.position, f"{what} would make the header longer than {MAX_HEADER_BYTES} bytes")
        while len(self.buffer) < end:
            have = len(self.buffer)
            wanted = max(end - have, min(max(have, _FIRST_READ), _LARGEST_READ))
            wanted = min(wanted, _LARGEST_READ, self.size - have)
            data = self._read_at(have, wanted)
            if not data or len(data) > wanted:
                raise HeaderIncompleteError(
                    f"{self.name}: only {have} of {self.size} bytes are there; {what} needs {end}", needed=end
                )
            self.buffer += data

    def take(self, length: int, what: str) -> bytes:
        self.require(length, what)
        start = self.position
        self.position += length
        return bytes(self.buffer[start : self.position])

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, *, longest: int) -> str:
        """A length-prefixed name of 1 to ``longest`` bytes of UTF-8 without NUL."""
        at = self.position
        length = self.u64(f"the length of {what}")
        if not 1 <= length <= longest:
            raise self.error(at, f"{what} must have 1 to {longest} bytes, but its length is {length}")
        data = self.take(length, what)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise self.error(at, f"{what} is not UTF-8 ({data[:40]!r})") from error
        if "\0" in text:
            raise self.error(at, f"{what} contains a NUL byte ({data[:40]!r})")
        return text

    def skip_strings(self, count: int, what: str) -> None:
        """Step over ``count`` length-prefixed strings; the loop is what a vocabulary costs, so it is kept bare."""
        buffer, unpack, position = self.buffer, _U64.unpack_from, self.position
        for _ in range(count):
            if position + 8 > len(buffer):
                self.position = position
                self.require(8, what)
            length = unpack(buffer, position)[0]
            position += 8 + length
            if position > len(buffer):
                self.position = position - length
                self.require(length, what)
        self.position = position
