"""Find a header's key-value pairs: one pass over bytes that nothing is known about yet."""

from __future__ import annotations

from glm5deploy.gguf_files.metadata import WIDTHS, Entry, ValueType
from glm5deploy.gguf_files.reader import ByteReader

_LONGEST_KEY = 65535


def read_pairs(reader: ByteReader, count: int) -> tuple[Entry, ...]:
    """Step over ``count`` pairs, checking each; raises :class:`FileFormatError`, also for a key that appears twice."""
    entries: dict[str, Entry] = {}
    for index in range(count):
        start = reader.position
        key = reader.text(f"key {index + 1} of {count}", longest=_LONGEST_KEY)
        if key in entries:
            raise reader.error(start, f"key {key!r} appears twice, first at offset {entries[key].start}")
        entries[key] = _read_value(reader, key, start)
    return tuple(entries.values())


def _read_value(reader: ByteReader, key: str, start: int) -> Entry:
    kind = element = _value_type(reader, key)
    length = 1
    if kind is ValueType.ARRAY:
        element = _value_type(reader, key)
        if element is ValueType.ARRAY:
            raise reader.error(start, f"key {key!r} is an array of arrays, which no GLM file has")
        length = reader.u64(f"the length of {key!r}")
    width = WIDTHS.get(element, 8)
    if length * width > reader.size - reader.position:
        raise reader.error(
            reader.position,
            f"key {key!r} claims {length} elements of {element.name.lower()}, more than the file's "
            f"{reader.size} bytes hold",
            hint="the file is cut or damaged: fetch it again",
        )
    value_start = reader.position
    if element is ValueType.STRING:
        reader.skip_strings(length, f"a string of key {key!r}")
    else:
        reader.require(length * width, f"the value of key {key!r}")
        reader.position += length * width
    return Entry(key, kind, element, length, start, value_start, reader.position)


def _value_type(reader: ByteReader, key: str) -> ValueType:
    at = reader.position
    number = reader.u32(f"the type of key {key!r}")
    try:
        return ValueType(number)
    except ValueError:
        raise reader.error(at, f"key {key!r} has value type {number}, expected 0 to {max(ValueType)}") from None
