"""Read a GGUF header without trusting it.

The format is ggml's ``docs/gguf.md``: magic, version, two counts, key-value pairs, tensor infos, then padding and data.
Versions 2 and 3 are read. Everything a header says is checked here once: counts and lengths against the file's size,
duplicate names, types, alignment, and that the tensors' bytes lie inside the file without overlapping. What passes can
be used without further checks; what does not raises :class:`FileFormatError` with file, offset and expectation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import ggml_type
from glm5deploy.gguf_files.layout import LARGEST_ALIGNMENT, Layout, padded
from glm5deploy.gguf_files.layout import TensorInfo as TensorInfo
from glm5deploy.gguf_files.metadata import Metadata, ValueType
from glm5deploy.gguf_files.pairs import read_pairs
from glm5deploy.gguf_files.reader import ByteReader, ReadAt

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

_MOST_PAIRS = 1 << 16
_MOST_TENSORS = 1 << 17
_SMALLEST_PAIR = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8
_LONGEST_TENSOR_NAME = 64
_MOST_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. ``raw`` holds the file's first bytes up to the end of the tensor infos."""

    name: str
    version: int
    alignment: int
    metadata: Metadata
    tensors: tuple[TensorInfo, ...]
    data_start: int
    file_size: int
    raw: bytes

    @property
    def data_end(self) -> int:
        """Offset in the file just past the last byte of the last tensor, padding not included."""
        return self.data_start + max((t.offset + t.nbytes for t in self.tensors), default=0)


def read_header(path: Path, *, alignments: Sequence[int] = (DEFAULT_ALIGNMENT,)) -> Header:
    """Read the header of the file at ``path``; see :func:`parse_header`."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise FileFormatError(f"{path}: is not a regular file")
        with path.open("rb", buffering=0) as file:
            descriptor = file.fileno()
            return parse_header(
                lambda at, length: os.pread(descriptor, length, at), size, str(path), alignments=alignments
            )
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error


def parse_header(read_at: ReadAt, size: int, name: str, *, alignments: Sequence[int] = (DEFAULT_ALIGNMENT,)) -> Header:
    """Read a header through ``read_at`` from a file of ``size`` bytes, called ``name`` in errors.

    Only the header's own bytes are fetched, in pieces that double from 64 KiB to 8 MiB. ``alignments`` are tried
    for a file without ``general.alignment`` (shards written by gguf-py lack the key); with more than one, the file's
    size decides. Raises :class:`FileFormatError`, or its subclass ``HeaderIncompleteError`` when ``read_at`` runs dry.
    """
    reader = ByteReader(read_at, size, name)
    version, tensor_count, pair_count = _read_preamble(reader)
    entries = read_pairs(reader, pair_count)
    tensors = _read_tensors(reader, tensor_count)
    raw = bytes(reader.buffer[: reader.position])
    metadata = Metadata(name, raw, entries)
    layout = Layout(name, size, len(raw), tensors)
    if ALIGNMENT_KEY in metadata:
        alignments = (_declared_alignment(metadata),)
    alignment = layout.fitting_alignment(alignments)
    header = Header(name, version, alignment, metadata, tensors, padded(len(raw), alignment), size, raw)
    _refuse_appended_file(header, read_at)
    return header


def _read_preamble(reader: ByteReader) -> tuple[int, int, int]:
    magic = reader.take(4, "the magic number")
    if magic != MAGIC:
        raise reader.error(0, f"expected the magic number {MAGIC!r}, found {magic!r}", hint="this is not a GGUF file")
    version = reader.u32("the version")
    if version in (2 << 24, 3 << 24):
        raise reader.error(4, "this is a big-endian GGUF file; only little-endian files can be used")
    if version not in (2, 3):
        raise reader.error(4, f"GGUF version {version} cannot be read, only 2 and 3", hint="convert the model again")
    tensor_count = reader.u64("the tensor count")
    pair_count = reader.u64("the key count")
    for at, count, what, most, smallest in (
        (8, tensor_count, "tensors", _MOST_TENSORS, _SMALLEST_TENSOR),
        (16, pair_count, "keys", _MOST_PAIRS, _SMALLEST_PAIR),
    ):
        if count > min(most, reader.size // smallest):
            raise reader.error(
                at,
                f"{count} {what} cannot be there, the file ends at {reader.size} (and no file may have over {most})",
                hint="the file is cut or damaged: fetch it again",
            )
    return version, tensor_count, pair_count


def _read_tensors(reader: ByteReader, count: int) -> tuple[TensorInfo, ...]:
    tensors: dict[str, TensorInfo] = {}
    for index in range(count):
        at = reader.position
        name = reader.text(f"the name of tensor {index + 1} of {count}", longest=_LONGEST_TENSOR_NAME)
        if name in tensors:
            raise reader.error(at, f"tensor {name!r} appears twice in this file")
        tensors[name] = _read_tensor(reader, name, at)
    return tuple(tensors.values())


def _read_tensor(reader: ByteReader, name: str, at: int) -> TensorInfo:
    dimensions = reader.u32(f"the dimension count of {name!r}")
    if dimensions > _MOST_DIMENSIONS:
        raise reader.error(at, f"tensor {name!r} has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
    shape = tuple(reader.u64(f"a dimension of {name!r}") for _ in range(dimensions)) or (1,)
    if not all(1 <= n < 1 << 63 for n in shape):
        raise reader.error(at, f"tensor {name!r} has shape {list(shape)}, expected dimensions of at least 1")
    type_id = reader.u32(f"the type of {name!r}")
    try:
        kind = ggml_type(type_id)
    except FileFormatError as error:
        raise reader.error(at, f"tensor {name!r}: {error.message}", hint=error.hint) from error
    if shape[0] % kind.block_elements:
        raise reader.error(
            at,
            f"tensor {name!r} has rows of {shape[0]}, not a multiple of {kind.name}'s block of {kind.block_elements}",
        )
    nbytes = kind.nbytes(prod(shape))
    offset = reader.u64(f"the offset of {name!r}")
    return TensorInfo(name, kind, shape, offset, nbytes)


def _declared_alignment(metadata: Metadata) -> int:
    entry = metadata.entries[ALIGNMENT_KEY]
    found: str | int | None = entry.type.name.lower()
    if entry.type is ValueType.UINT32:
        found = metadata.integer(ALIGNMENT_KEY)
        if isinstance(found, int) and 8 <= found <= LARGEST_ALIGNMENT and found & (found - 1) == 0:
            return found
    raise FileFormatError(
        f"{metadata.name}: at offset {entry.start}: {ALIGNMENT_KEY} must be a uint32 power of two from 8 to "
        f"{LARGEST_ALIGNMENT}, but is {found}"
    )


def _refuse_appended_file(header: Header, read_at: ReadAt) -> None:
    """Shards put together with ``cat`` look like their first one; the next magic number gives them away."""
    end = header.data_end
    for at in sorted({len(header.raw) if not header.tensors else end, end, padded(end, header.alignment)}):
        if at + 4 <= header.file_size and read_at(at, 4) == MAGIC:
            raise FileFormatError(
                f"{header.name}: at offset {at}: another GGUF file is appended after the tensor data",
                hint="shards joined with cat are no model: name the shards themselves, `glm5deploy merge` joins them",
            )
