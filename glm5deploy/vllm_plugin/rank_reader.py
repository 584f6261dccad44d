"""From mapped files to planes on the device: each rank copies its own bytes, a few megabytes at a time.

A *slab* is one rank's part of one stored tensor and the planes it fills. Slabs are cut into pieces; threads copy the
next pieces from the mapping into pinned buffers while the device rearranges the one before. Pages are given back at
once, so neither the mapping nor the buffers let the process grow with the file.

Cuts along a row take a few hundred bytes out of each row. Only those are copied and counted, but the file system
reads whole pages: on one machine all ranks share them through the page cache.
"""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.planes import Planes, repack

PIECE_WEIGHTS = 1 << 24  # of a piece: bounds the buffers and what rearranging takes on the device
_BUFFERS = 4
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Source:
    """Matrices of a GGUF tensor: ``experts`` of them, ``rows`` rows each from row ``first`` of ``height``.

    ``name`` is the Hugging Face name it stands for (of expert stacks with ``{expert}``).
    """

    tensor: ShardTensor
    name: str
    rows: int
    experts: int = 1
    first: int = 0
    height: int = 0

    @property
    def columns(self) -> int:
        return self.tensor.shape[0]

    @property
    def planes_type(self) -> str:
        """The type the planes have: the file's own, or bf16 for one that no kernel reads."""
        return self.tensor.type.name if self.tensor.type.name in FORMATS else "BF16"

    @property
    def dense(self) -> bool:
        """True where dense numbers are kept: the file has such, or no kernel reads its type."""
        return FORMATS[self.planes_type].scales is Scales.DENSE


@dataclass(frozen=True, slots=True)
class Slab:
    """``rows`` and ``columns`` of the matrices ``experts`` of a source, and the planes that receive them.

    Planes may have more rows than are read (padding of the vocabulary); those are zeroed.
    """

    source: Source
    target: Planes
    experts: Sequence[int]
    rows: range
    columns: range

    def __post_init__(self) -> None:
        block = self.source.tensor.type.block_elements
        if self.columns.start % block or self.columns.stop % block:
            raise FileFormatError(
                f"{self.source.tensor.name}: columns {self.columns.start} to {self.columns.stop} cut a block of "
                f"{block} {self.source.tensor.type.name} weights",
                hint="Use a smaller tensor-parallel size, or --enable-expert-parallel for routed experts.",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.experts) * len(self.rows) * self.source.tensor.type.nbytes(len(self.columns))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a slab: experts ``e0`` to ``e1`` of its list, rows ``r0`` to ``r1`` of its range, counted from 0."""

    slab: Slab
    e0: int
    e1: int
    r0: int
    r1: int

    @property
    def transcoded(self) -> bool:
        return self.slab.source.planes_type != self.slab.source.tensor.type.name

    @property
    def weights(self) -> int:
        return (self.e1 - self.e0) * (self.r1 - self.r0) * len(self.slab.columns)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and bytes a row as they are handed to the device."""
        columns = len(self.slab.columns)
        width = 2 * columns if self.transcoded else self.slab.source.tensor.type.nbytes(columns)
        return self.e1 - self.e0, self.r1 - self.r0, width


def pieces(slab: Slab, weights: int) -> Iterator[Piece]:
    """Cut a slab into pieces of at most ``weights`` weights: some experts, or some rows of one."""
    columns, rows, experts = len(slab.columns), len(slab.rows), len(slab.experts)
    if columns * rows <= weights:
        step = max(1, weights // max(1, columns * rows))
        for e in range(0, experts, step):
            yield Piece(slab, e, min(e + step, experts), 0, rows)
        return
    step = max(1, weights // columns)
    for e in range(experts):
        for r in range(0, rows, step):
            yield Piece(slab, e, e + 1, r, min(r + step, rows))


class Mappings:
    """The files, mapped once each. ``taken`` counts bytes copied out of them."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self.taken = 0

    def open(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self._maps:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def copy(self, piece: Piece, out: np.ndarray) -> int:
        """Copy a piece into ``out``, uint8 of the piece's shape, and give its pages back; returns the bytes taken."""
        slab, source = piece.slab, piece.slab.source
        tensor = source.tensor
        width = tensor.type.nbytes(source.columns)
        here = slice(tensor.type.nbytes(slab.columns.start), tensor.type.nbytes(slab.columns.stop))
        mapped = self._maps[tensor.path]
        count = piece.r1 - piece.r0
        bytes_taken = 0
        for i, expert in enumerate(slab.experts[piece.e0 : piece.e1]):
            row = expert * (source.height or source.rows) + source.first + slab.rows.start + piece.r0
            start = tensor.offset + row * width
            _advise(mapped, mmap.MADV_WILLNEED, start, count * width)
            stored = np.frombuffer(mapped, np.uint8, count * width, start).reshape(count, width)[:, here]
            if piece.transcoded:
                numbers = dequantize(np.array(stored), GGMLQuantizationType(tensor.type.id))
                out[i] = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy()
            else:
                np.copyto(out[i], stored)
            bytes_taken += stored.size
            del stored
            _advise(mapped, mmap.MADV_DONTNEED, start, count * width)
        return bytes_taken


def _advise(mapped: mmap.mmap, advice: int, start: int, size: int) -> None:
    """Tell the kernel about the whole pages around ``size`` bytes at ``start``. A read-only mapping loses nothing."""
    first = start // _PAGE * _PAGE
    mapped.madvise(advice, first, min(start + size, len(mapped)) - first)


class Reader:
    """Fills slabs, ``weights`` weights at a time. ``report`` gets (bytes taken, bytes in all) after every piece."""

    def __init__(
        self,
        device: torch.device,
        report: Callable[[int, int], None] = lambda taken, total: None,
        weights: int = PIECE_WEIGHTS,
    ) -> None:
        self.device = device
        self.mappings = Mappings()
        self._report = report
        self._weights = weights

    def fill(self, slabs: Sequence[Slab]) -> int:
        """Fill every slab's planes, in the order of the file; returns the bytes copied from it."""
        slabs = sorted(slabs, key=lambda s: (s.source.tensor.shard, s.source.tensor.offset))
        self.mappings.open(slab.source.tensor.path for slab in slabs)
        total = sum(slab.nbytes for slab in slabs)
        for slab in slabs:
            _zero_padding(slab)
        queue = deque(piece for slab in slabs for piece in pieces(slab, self._weights))
        size = max((int(np.prod(piece.shape)) for piece in queue), default=0)
        with ThreadPoolExecutor(_BUFFERS) as pool:
            free = [_Buffer(size, self.device) for _ in range(min(_BUFFERS, len(queue)))]
            running: deque[tuple[Piece, _Buffer, Future[int]]] = deque()
            while queue or running:
                while queue and free:
                    piece, buffer = queue.popleft(), free.pop()
                    buffer.wait()
                    future = pool.submit(self.mappings.copy, piece, buffer.array(piece.shape))
                    running.append((piece, buffer, future))
                piece, buffer, future = running.popleft()
                self.mappings.taken += future.result()
                place(piece, buffer.upload(piece.shape))
                free.append(buffer)
                self._report(self.mappings.taken, total)
        return self.mappings.taken


class _Buffer:
    """A host buffer, pinned for a GPU; free again when the copy to the device is done."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda, device="cpu")
        self._done = torch.cuda.Event() if self._cuda else None

    def _view(self, shape: tuple[int, int, int]) -> torch.Tensor:
        return self._host[: shape[0] * shape[1] * shape[2]].view(shape)

    def array(self, shape: tuple[int, int, int]) -> np.ndarray:
        return self._view(shape).numpy()

    def wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def upload(self, shape: tuple[int, int, int]) -> torch.Tensor:
        data = self._view(shape).to(self._device, non_blocking=True)
        if self._done is not None:
            self._done.record()
        return data


def place(piece: Piece, raw: torch.Tensor) -> None:
    """Rearrange raw rows, uint8 [experts, rows, bytes a row] on the device, into the slab's planes."""
    target = piece.slab.target
    made = repack(target.format.name, raw, len(piece.slab.columns))
    for name in ("low", "high", "words", "halves"):
        mine, theirs = getattr(target, name), getattr(made, name)
        if mine is not None:
            _rows(name, mine[piece.e0 : piece.e1], piece.r0, piece.r1).copy_(theirs)


def _rows(name: str, plane: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Rows of a plane: [E, S, N, ...] for codes, [E, S, fields, N] for scales."""
    return plane[:, :, start:stop] if name in ("low", "high") else plane[:, :, :, start:stop]


def _zero_padding(slab: Slab) -> None:
    if slab.target.rows > len(slab.rows):
        for name in ("low", "high", "words", "halves"):
            plane = getattr(slab.target, name)
            if plane is not None:
                _rows(name, plane, len(slab.rows), slab.target.rows).zero_()


class Progress:
    """A line every few seconds: bytes, rate and time left; the last one says how long it took."""

    def __init__(self, say: Callable[[str], None], every: float = 5.0) -> None:
        self._say, self._every = say, every
        self._begun = self._said = time.monotonic()

    def __call__(self, taken: int, total: int) -> None:
        now = time.monotonic()
        spent = now - self._begun
        rate = taken / spent if spent > 0 else 0.0
        if taken >= total:
            self._say(f"{total / 1e9:.2f} GB of quantised weights read in {spent:.1f} s ({rate / 1e9:.2f} GB/s)")
        elif now - self._said >= self._every and rate:
            self._said = now
            left = (total - taken) / rate
            self._say(f"{taken / 1e9:.1f} of {total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, {left:.0f} s left")
