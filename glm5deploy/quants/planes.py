"""Blocks of a GGUF file rearranged into planes that kernels read with 16-byte loads, and back.

Letters: E experts (1 for a linear layer), N rows (outputs), S super-blocks of 256 weights along a row, and inside a
super-block tile i of 16 and column j of 16: weight 16 i + j. All planes put S before N, so that the rows a kernel reads
together are contiguous:

======  ======================  ====================================================================================
plane   shape                   content
======  ======================  ====================================================================================
low     int16 [E, S, b, N, 16]  b bits a code (2, 4 or 8): element j of part p holds tiles 16 p / b and on, the first in
                                the lowest bits
..      bf16 [E, S, 16, N, 16]  dense types: tile i is part i
high    int16 [E, S, b, N, 16]  one or two more bits a code, likewise
words   int32 [E, S, W, N]      packed scales, the file's own bytes
halves  int16 [E, S, H, N]      fp16 scales (and IQ4_XS's upper scale bits), the file's own bytes
======  ======================  ====================================================================================

Nothing is rounded: planes hold the file's bits, moved. Rows whose length is no multiple of 256 (32-blocks only) are
filled up with zero blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5deploy.errors import FileFormatError
from glm5deploy.quants.codebooks import sign_magnitude
from glm5deploy.quants.formats import SUPER, Bits, Format, format_of

_DENSE_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Planes:
    """One weight [rows, columns], or ``experts`` of them, in kernel order. ``scales`` planes may be absent."""

    format: Format
    rows: int
    columns: int
    low: torch.Tensor
    high: torch.Tensor | None
    words: torch.Tensor | None
    halves: torch.Tensor | None

    @property
    def experts(self) -> int:
        return self.low.shape[0]

    @property
    def supers(self) -> int:
        """Super-blocks along a row."""
        return self.low.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.low, self.high, self.words, self.halves) if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    def slice(self, start: int, stop: int) -> Planes:
        """Experts ``start`` to ``stop`` as views."""
        parts = (None if t is None else t[start:stop] for t in (self.low, self.high, self.words, self.halves))
        return Planes(self.format, self.rows, self.columns, *parts)  # type: ignore[arg-type]

    def take(self, rows: torch.Tensor) -> Planes:
        """Rows int64 [R] of every expert, in that order."""
        parts = (None if t is None else t.index_select(3, rows) for t in (self.low, self.high, self.words, self.halves))
        return Planes(self.format, rows.shape[0], self.columns, *parts)  # type: ignore[arg-type]

    def copy_(self, other: Planes) -> None:
        """Fill these planes (a slice of preallocated ones, say) with others of the same shape and type."""
        if (self.format.name, self.rows, self.columns) != (other.format.name, other.rows, other.columns):
            raise ValueError(f"planes differ: {self.format.name} {self.rows}x{self.columns} from {other.format.name}")
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


def empty_planes(type_name: str, rows: int, columns: int, experts: int = 1, device: str = "cpu") -> Planes:
    """Uninitialised planes for ``experts`` weights [rows, columns]; a loader fills them expert by expert."""
    fmt = format_of(type_name)
    supers = -(-columns // SUPER)

    def bits(width: int) -> torch.Tensor:
        dtype = torch.bfloat16 if fmt.dense else torch.int16
        return torch.empty((experts, supers, width, rows, 16), dtype=dtype, device=device)

    def scales(count: int, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty((experts, supers, count, rows), dtype=dtype, device=device) if count else None

    return Planes(
        fmt,
        rows,
        columns,
        bits(fmt.low),
        bits(fmt.high) if fmt.high else None,
        scales(fmt.word_count, torch.int32),
        scales(fmt.half_count, torch.int16),
    )


def _blocks(fmt: Format, raw: torch.Tensor) -> torch.Tensor:
    """Row bytes [..., N, row bytes] to uint8 [..., N, S, blocks of a super-block, block bytes], zero-filled."""
    count, rest = divmod(raw.shape[-1], fmt.block_bytes)
    if rest or not count or raw.dtype != torch.uint8:
        raise FileFormatError(f"rows of {raw.shape[-1]} bytes are no whole {fmt.name} blocks of {fmt.block_bytes}")
    missing = -count % fmt.blocks
    if missing:
        raw = torch.nn.functional.pad(raw, (0, missing * fmt.block_bytes))
    return raw.unflatten(-1, (-1, fmt.blocks, fmt.block_bytes))


def _take_bits(blocks: torch.Tensor, bits: Bits) -> torch.Tensor:
    """Codes uint8 [..., S, 256] in weight order."""
    data = blocks[..., bits.start : bits.start + bits.size]
    if bits.width == 8:
        return data.flatten(-2)
    shifts = torch.arange(0, 8, bits.width, dtype=torch.uint8, device=data.device)
    runs = data.unflatten(-1, (bits.size // bits.run, 1, bits.run))
    return ((runs >> shifts[:, None]) & ((1 << bits.width) - 1)).flatten(-4)


def _put_bits(blocks: torch.Tensor, bits: Bits, codes: torch.Tensor) -> None:
    count = blocks.shape[-2]
    per_byte = 8 // bits.width
    runs = codes.unflatten(-1, (count, bits.size // bits.run, per_byte, bits.run)).to(torch.int32)
    shifts = torch.arange(0, 8, bits.width, dtype=torch.int32, device=codes.device)
    blocks[..., bits.start : bits.start + bits.size] = (runs << shifts[:, None]).sum(-2).flatten(-2).to(torch.uint8)


def _reinterpret(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reinterpret the last axis. torch refuses empty axes, and axes of length one whose stride is left over."""
    if not data.shape[-1]:
        return data.to(dtype)
    return data.clone(memory_format=torch.contiguous_format).view(dtype)


@dataclass(frozen=True, slots=True)
class Fields:
    """Super-blocks in weight order: codes uint8 [..., N, S, 256], words int32 [..., S, W], halves int16 [..., S, H]."""

    codes: torch.Tensor
    words: torch.Tensor
    halves: torch.Tensor


def _split(fmt: Format, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Row bytes of a quantised type: low and high bits of the codes, uint8 [..., N, S, 256], words and halves."""
    blocks = _blocks(fmt, raw)
    high: torch.Tensor | None = None
    if fmt.transcoded:
        codes, scale_bytes = sign_magnitude(fmt, blocks.squeeze(-2))
        low = codes & ((1 << fmt.low) - 1) if fmt.high else codes
        high = codes >> fmt.low if fmt.high else None
    else:
        assert fmt.low_bits is not None
        low = _take_bits(blocks, fmt.low_bits)
        high = _take_bits(blocks, fmt.high_bits) if fmt.high_bits is not None else None
        start, size = fmt.words
        scale_bytes = blocks[..., start : start + size].flatten(-2)
    halves = [blocks[..., at : at + 2].flatten(-2) for at in fmt.halves]
    half_bytes = torch.cat(halves, -1) if halves else scale_bytes[..., :0]
    return low, high, _reinterpret(scale_bytes, torch.int32), _reinterpret(half_bytes, torch.int16)


def fields_of(fmt: Format, raw: torch.Tensor) -> Fields:
    """Take row bytes uint8 [..., N, row bytes] of a quantised type apart."""
    low, high, words, halves = _split(fmt, raw)
    return Fields(low if high is None else low | (high << fmt.low), words, halves)


def raw_of(fmt: Format, fields: Fields, columns: int) -> torch.Tensor:
    """The file's row bytes again; not for transcoded types."""
    shape = fields.codes.shape[:-1]
    blocks = torch.zeros((*shape, fmt.blocks, fmt.block_bytes), dtype=torch.uint8, device=fields.codes.device)
    assert fmt.low_bits is not None
    _put_bits(blocks, fmt.low_bits, fields.codes & ((1 << fmt.low) - 1))
    if fmt.high_bits is not None:
        _put_bits(blocks, fmt.high_bits, fields.codes >> fmt.low)
    start, size = fmt.words
    if size:
        blocks[..., start : start + size] = _reinterpret(fields.words, torch.uint8).unflatten(-1, (fmt.blocks, size))
    for k, at in enumerate(fmt.halves):
        half = _reinterpret(fields.halves[..., k * fmt.blocks : (k + 1) * fmt.blocks], torch.uint8)
        blocks[..., at : at + 2] = half.unflatten(-1, (fmt.blocks, 2))
    return blocks.flatten(-3)[..., : columns // fmt.block_elements * fmt.block_bytes]


def _pack(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes uint8 [E, N, S, 256], below 2^width each, to a plane. Bytes stay bytes to the end: loading does this."""
    fields = codes.unflatten(-1, (width, 2, 8 // width, 16))  # [E, N, S, part, byte of it, field of that, j]
    while fields.shape[-2] > 1:
        fields = fields[..., ::2, :] | (fields[..., 1::2, :] << width)
        width *= 2
    return fields.squeeze(-2).permute(0, 2, 3, 1, 5, 4).contiguous().view(torch.int16).squeeze(-1)


def _unpack(plane: torch.Tensor, width: int) -> torch.Tensor:
    """A plane to codes uint8 [E, N, S, 256]."""
    packed = plane.to(torch.int32).permute(0, 3, 1, 2, 4)  # [E, N, S, part, j]
    shifts = torch.arange(0, 16, width, dtype=torch.int32, device=plane.device)
    return ((packed[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)).to(torch.uint8).flatten(-3)


def repack(type_name: str, raw: torch.Tensor, columns: int | None = None) -> Planes:
    """Row bytes uint8 [N, row bytes] or [E, N, row bytes] of a GGML type to planes, on the tensor's own device.

    F32 and F16 weights are rounded to bf16 here, as every product rounds its weights; all else is exact. ``columns`` is
    checked when given. Raises :class:`FileFormatError` when a row is no whole number of blocks.
    """
    fmt = format_of(type_name)
    raw = raw if raw.dim() == 3 else raw[None]
    found = raw.shape[-1] // fmt.block_bytes * fmt.block_elements
    if columns is not None and columns != found:
        raise FileFormatError(f"{fmt.name} rows of {raw.shape[-1]} bytes hold {found} weights, not {columns}")
    rows = raw.shape[-2]
    if fmt.dense:
        _blocks(fmt, raw)  # checks the row length
        dense = raw.contiguous().view(_DENSE_DTYPES[fmt.name]).to(torch.bfloat16)
        dense = torch.nn.functional.pad(dense, (0, -found % SUPER)).unflatten(-1, (-1, 16, 16))
        return Planes(fmt, rows, found, dense.permute(0, 2, 3, 1, 4).contiguous(), None, None, None)
    low, high, words, halves = _split(fmt, raw)
    return Planes(
        fmt,
        rows,
        found,
        _pack(low, fmt.low),
        None if high is None else _pack(high, fmt.high),
        words.permute(0, 2, 3, 1).contiguous() if fmt.word_count else None,
        halves.permute(0, 2, 3, 1).contiguous() if fmt.half_count else None,
    )


def fields_of_planes(planes: Planes) -> Fields:
    """Take planes of a quantised type apart again: [E, N, S, ...]."""
    fmt = planes.format
    codes = _unpack(planes.low, fmt.low)
    if planes.high is not None:
        codes = codes | (_unpack(planes.high, fmt.high) << fmt.low)
    none = torch.empty((*codes.shape[:-1], 0), dtype=torch.int32, device=codes.device)
    words = none if planes.words is None else planes.words.permute(0, 3, 1, 2)
    halves = none.to(torch.int16) if planes.halves is None else planes.halves.permute(0, 3, 1, 2)
    return Fields(codes, words, halves)


def restore(planes: Planes) -> torch.Tensor:
    """The file's bytes [E, N, row bytes] from planes. Not for transcoded or dense types."""
    if planes.format.transcoded or planes.format.dense:
        raise ValueError(f"{planes.format.name} planes do not hold the file's own codes")
    return raw_of(planes.format, fields_of_planes(planes), planes.columns)
