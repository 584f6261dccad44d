"""A GGUF header's key-value pairs: found in one pass, decoded when asked for.

A model's vocabulary and merges are half a million strings; most readers want neither. Each value is kept as a span of
the header's bytes, which is also what a merge copies: bytes are never decoded and encoded again on the way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from glm5deploy.errors import FileFormatError

Scalar = int | float | bool | str
MetadataValue = Scalar | tuple[Scalar, ...]

_LENGTH = struct.Struct("<Q")


class ValueType(IntEnum):
    """GGUF's metadata value types (``gguf_type`` in ggml's ``gguf.h``)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


#: struct code of every type of fixed size
FORMATS: Mapping[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
WIDTHS: Mapping[ValueType, int] = {t: struct.calcsize("<" + code) for t, code in FORMATS.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One pair as spans of the header: ``[start, end)`` is all of it, ``[value_start, end)`` its value alone.

    ``count`` is the number of elements of an array and 1 otherwise; ``element_type`` is the type of a scalar too.
    """

    key: str
    type: ValueType
    element_type: ValueType
    count: int
    start: int
    value_start: int
    end: int


class Metadata(Mapping[str, MetadataValue]):
    """The pairs of one header, in file order. ``metadata[key]`` is an int, float, bool, str or a tuple of those.

    Raises :class:`FileFormatError` when a string asked for is not UTF-8.
    """

    def __init__(self, name: str, raw: bytes, entries: tuple[Entry, ...]) -> None:
        self.name = name
        self._raw = raw
        self.entries: Mapping[str, Entry] = {entry.key: entry for entry in entries}
        self._decoded: dict[str, MetadataValue] = {}

    def __getitem__(self, key: str) -> MetadataValue:
        if key not in self._decoded:
            self._decoded[key] = self._decode(self.entries[key])
        return self._decoded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries

    def raw(self, key: str) -> bytes:
        """The bytes of the whole pair: key, type and value."""
        entry = self.entries[key]
        return self._raw[entry.start : entry.end]

    def integer(self, key: str, default: int | None = None) -> int | None:
        """The value of an integer key of any width; ``default`` if it is absent; an error if it is anything else."""
        if key not in self.entries:
            return default
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise FileFormatError(
                f"{self.name}: {key} at offset {self.entries[key].start} must be an integer, "
                f"but is {self.entries[key].type.name.lower()}"
            )
        return value

    def _decode(self, entry: Entry) -> MetadataValue:
        if entry.element_type is ValueType.STRING:
            strings = tuple(self._strings(entry))
            return strings if entry.type is ValueType.ARRAY else strings[0]
        numbers = struct.unpack_from(f"<{entry.count}{FORMATS[entry.element_type]}", self._raw, entry.value_start)
        return numbers if entry.type is ValueType.ARRAY else numbers[0]

    def _strings(self, entry: Entry) -> Iterator[str]:
        raw, position = self._raw, entry.value_start
        for _ in range(entry.count):
            (length,) = _LENGTH.unpack_from(raw, position)
            position += 8 + length
            try:
                yield raw[position - length : position].decode()
            except UnicodeDecodeError as error:
                raise FileFormatError(
                    f"{self.name}: {entry.key}: the string at offset {position - length} is not UTF-8: {error.reason}"
                ) from error
