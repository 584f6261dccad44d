"""What a merged file consists of: a new header, and runs of bytes copied out of the shards. Pure; reads no file.

The result equals that of ``llama-gguf-split --merge`` byte for byte where that tool is right: version 3, the keys of
shard 1 in their order with their bytes, ``split.count`` moved last as uint16 0, tensors in shard order without
trailing dimensions of 1, zeros between them. Where it is wrong this differs: the layout follows ``general.alignment``
(the tool always uses 32), strings keep what follows a NUL, and keys that only a later shard has are kept, before
``split.count``.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from glm5deploy.errors import UsageError
from glm5deploy.gguf_files.header import ALIGNMENT_KEY, MAGIC, Header, TensorInfo
from glm5deploy.gguf_files.layout import padded
from glm5deploy.gguf_files.metadata import ValueType
from glm5deploy.gguf_files.shard_checks import COUNT_KEY, SPLIT_KEYS
from glm5deploy.gguf_files.shards import ShardSet

_VERSION = 3


@dataclass(frozen=True, slots=True)
class Source:
    """A shard as the plan knows it."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Copy:
    """``length`` bytes at ``source_offset`` of source number ``source`` go to ``offset`` of the merged file."""

    source: int
    source_offset: int
    offset: int
    length: int


@dataclass(frozen=True)
class Plan:
    """A merge: ``header`` fills the file up to its data, ``copies`` follow in order, ``zeros`` are (offset, length).

    ``tensors`` maps each name to its bytes: one :class:`Copy` a tensor, in file order.
    """

    header: bytes
    sources: tuple[Source, ...]
    copies: tuple[Copy, ...]
    zeros: tuple[tuple[int, int], ...]
    tensors: dict[str, Copy]
    size: int

    @property
    def data_bytes(self) -> int:
        """Bytes to copy, all runs together."""
        return sum(copy.length for copy in self.copies)

    @cached_property
    def digest(self) -> str:
        """sha256 over everything that decides the merged file, the sources' names and sizes included."""
        return hashlib.sha256(json.dumps(self.describe()).encode()).hexdigest()

    def describe(self) -> dict[str, Any]:
        """The plan as JSON, with the header's sha256 in place of the header."""
        return {
            "header_sha256": hashlib.sha256(self.header).hexdigest(),
            "header_bytes": len(self.header),
            "sources": [asdict(source) for source in self.sources],
            "copies": [_row(copy) for copy in self.copies],
            "zeros": [list(zero) for zero in self.zeros],
            "tensors": {name: _row(copy) for name, copy in self.tensors.items()},
            "size": self.size,
        }

    @classmethod
    def restore(cls, described: dict[str, Any], header: bytes) -> Plan:
        """The plan of :meth:`describe`, with its header read back from the partial file."""
        return cls(
            header,
            tuple(Source(**source) for source in described["sources"]),
            tuple(Copy(*row) for row in described["copies"]),
            tuple((offset, length) for offset, length in described["zeros"]),
            {name: Copy(*row) for name, row in described["tensors"].items()},
            described["size"],
        )


def _row(copy: Copy) -> list[int]:
    return [copy.source, copy.source_offset, copy.offset, copy.length]


def plan_merge(shards: ShardSet) -> Plan:
    """How to make one file of ``shards``; :class:`UsageError` if it is one file already."""
    if len(shards.headers) == 1:
        raise UsageError(f"{shards.headers[0].name}: is a single file already", hint="serve it as it is")
    alignment = shards.headers[0].alignment
    infos, data = bytearray(), 0
    places: list[tuple[int, int]] = []
    for header in shards.headers:
        for tensor in header.tensors:
            infos += _info(tensor, data)
            places.append((data, tensor.nbytes))
            data += padded(tensor.nbytes, alignment)
    pairs = _pairs(shards.headers)
    head = MAGIC + struct.pack("<IQQ", _VERSION, len(places), len(pairs)) + b"".join(pairs) + infos
    start = padded(len(head), alignment)
    tensors = {
        tensor.name: Copy(tensor.shard, tensor.offset, start + place, nbytes)
        for tensor, (place, nbytes) in zip(shards.tensors, places, strict=True)
    }
    return Plan(
        header=bytes(head).ljust(start, b"\0"),
        sources=tuple(Source(str(Path(h.name).absolute()), h.file_size) for h in shards.headers),
        copies=_runs(list(tensors.values())),
        zeros=tuple(
            (start + place + nbytes, gap) for place, nbytes in places if (gap := padded(nbytes, alignment) - nbytes)
        ),
        tensors=tensors,
        size=start + data,
    )


def _info(tensor: TensorInfo, offset: int) -> bytes:
    shape = list(tensor.shape)
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    name = tensor.name.encode()
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.type.id, offset)
    )


def _pairs(headers: tuple[Header, ...]) -> list[bytes]:
    pairs = {key: header.metadata.raw(key) for header in headers[:1] for key in header.metadata if key != COUNT_KEY}
    for header in headers[1:]:
        for key in header.metadata:
            if key not in pairs and key not in SPLIT_KEYS and key != ALIGNMENT_KEY:
                pairs[key] = header.metadata.raw(key)
    count = COUNT_KEY.encode()
    last = struct.pack("<Q", len(count)) + count + struct.pack("<IH", ValueType.UINT16, 0)
    return [*pairs.values(), last]


def _runs(tensors: list[Copy]) -> tuple[Copy, ...]:
    """Neighbouring tensors that keep their distance to each other, joined: as a rule one run a shard."""
    runs: list[Copy] = []
    for tensor in tensors:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.source == tensor.source
            and last.source_offset - last.offset == tensor.source_offset - tensor.offset
        ):
            length = tensor.offset + tensor.length - last.offset
            runs[-1] = Copy(last.source, last.source_offset, last.offset, length)
        else:
            runs.append(tensor)
    return tuple(runs)
