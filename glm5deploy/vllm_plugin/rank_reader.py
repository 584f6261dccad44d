"""From files to planes on the device: each rank copies its own bytes, a few megabytes at a time.

A *slab* is one rank's part of one stored tensor and the planes it fills. Slabs are cut into pieces; threads bring the
next pieces into pinned buffers while the device rearranges the one before. Whole rows are read straight into the
buffer, which from the page cache is faster by half than copying them out of a mapping.

Cuts along a row take a few hundred bytes out of each row. Those are copied out of a mapping, whose pages are given
back at once: only they are copied and counted, but the file system reads whole pages, which on one machine all ranks
share through the page cache. So neither mappings nor buffers let the process grow with the file.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.planes import Planes, repack

PIECE_BYTES = 16 << 20  # of a piece: bounds the buffers and what rearranging takes on the device
_BUFFERS = 8  # pieces under way at a time, each with a thread that reads
_PAGE = mmap.PAGESIZE
_FETCH = "`glm5deploy fetch` checks the file and mends it."


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
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and bytes a row as they are handed to the device."""
        columns = len(self.slab.columns)
        width = 2 * columns if self.transcoded else self.slab.source.tensor.type.nbytes(columns)
        return self.e1 - self.e0, self.r1 - self.r0, width


def pieces(slab: Slab, most: int) -> Iterator[Piece]:
    """Cut a slab into pieces of at most ``most`` bytes of a buffer: some experts, or some rows of one."""
    rows, experts = len(slab.rows), len(slab.experts)
    width = Piece(slab, 0, 1, 0, 1).shape[2]
    if width * rows <= most:
        step = max(1, most // max(1, width * rows))
        for e in range(0, experts, step):
            yield Piece(slab, e, min(e + step, experts), 0, rows)
        return
    step = max(1, most // width)
    for e in range(experts):
        for r in range(0, rows, step):
            yield Piece(slab, e, e + 1, r, min(r + step, rows))


class Files:
    """The files, opened and mapped once each. ``taken`` counts bytes copied out of them."""

    def __init__(self) -> None:
        self._files: dict[Path, tuple[FileIO, mmap.mmap]] = {}
        self.taken = 0

    def open(self, paths: Iterable[Path]) -> None:
        for path in paths:
            if path not in self._files:
                file = FileIO(path)
                self._files[path] = file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def copy(self, piece: Piece, out: np.ndarray) -> int:
        """Copy a piece into ``out``, uint8 of the piece's shape; returns the bytes taken.

        Raises :class:`FileFormatError` when the file ends too early.
        """
        slab, source = piece.slab, piece.slab.source
        tensor = source.tensor
        width = tensor.type.nbytes(source.columns)
        here = slice(tensor.type.nbytes(slab.columns.start), tensor.type.nbytes(slab.columns.stop))
        file, mapped = self._files[tensor.path]
        count = piece.r1 - piece.r0
        bytes_taken = 0
        for i, expert in enumerate(slab.experts[piece.e0 : piece.e1]):
            row = expert * (source.height or source.rows) + source.first + slab.rows.start + piece.r0
            start = tensor.offset + row * width
            if start + count * width > len(mapped):
                raise FileFormatError(
                    f"{tensor.path} ends inside of {tensor.name}", hint="`glm5deploy fetch` mends it."
                )
            if here.stop - here.start == width and not piece.transcoded:
                os.posix_fadvise(file.fileno(), start, count * width, os.POSIX_FADV_WILLNEED)
                _read(file, out[i].reshape(-1), start)
                bytes_taken += out[i].size
                continue
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


def _read(file: FileIO, out: np.ndarray, offset: int) -> None:
    """Fill ``out``, uint8 [n], from ``offset`` on; the file was seen to be long enough."""
    done = 0
    while done < out.size:
        got = os.preadv(file.fileno(), [out[done:].data], offset + done)
        if not got:
            raise FileFormatError(f"{file.name} became shorter while it was read")
        done += got


def _advise(mapped: mmap.mmap, advice: int, start: int, size: int) -> None:
    """Tell the kernel about the whole pages around ``size`` bytes at ``start``. A read-only mapping loses nothing."""
    first = start // _PAGE * _PAGE
    mapped.madvise(advice, first, min(start + size, len(mapped)) - first)


class Reader:
    """Fills slabs, ``most`` bytes at a time. ``report`` gets (bytes taken, bytes in all) after every piece."""

    def __init__(
        self,
        device: torch.device,
        report: Callable[[int, int], None] = lambda taken, total: None,
        most: int = PIECE_BYTES,
    ) -> None:
        self.device = device
        self.files = Files()
        self._report = report
        self._most = most

    def fill(self, slabs: Sequence[Slab]) -> int:
        """Fill every slab's planes, in the order of the file; returns the bytes copied from it."""
        slabs = sorted(slabs, key=lambda s: (s.source.tensor.shard, s.source.tensor.offset))
        self.files.open(slab.source.tensor.path for slab in slabs)
        total = sum(slab.nbytes for slab in slabs)
        for slab in slabs:
            _zero_padding(slab)
        queue = deque(piece for slab in slabs for piece in pieces(slab, self._most))
        size = max((int(np.prod(piece.shape)) for piece in queue), default=0)
        with ThreadPoolExecutor(_BUFFERS) as pool:
            copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            free = [_Buffer(size, self.device, copies) for _ in range(min(_BUFFERS, len(queue)))]
            running: deque[tuple[Piece, _Buffer, Future[int]]] = deque()
            while queue or running:
                while queue and free:
                    piece, buffer = queue.popleft(), free.pop()
                    running.append((piece, buffer, pool.submit(self._bring, piece, buffer)))
                piece, buffer, future = running.popleft()
                self.files.taken += future.result()
                place(piece, buffer.upload(piece.shape))
                buffer.release()
                free.append(buffer)
                self._report(self.files.taken, total)
        return self.files.taken

    def _bring(self, piece: Piece, buffer: _Buffer) -> int:
        """Runs in a thread: the one that hands pieces to the device never waits for a buffer."""
        buffer.wait()
        return self.files.copy(piece, buffer.array(piece.shape))


class _Buffer:
    """A host buffer; for a GPU pinned, copied there on the stream ``copies``. Free again once its piece is placed."""

    def __init__(self, size: int, device: torch.device, copies: torch.cuda.Stream | None) -> None:
        self._device, self._copies = device, copies
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=copies is not None, device="cpu")
        self._placed = torch.cuda.Event(blocking=True) if copies is not None else None

    def _view(self, shape: tuple[int, int, int]) -> torch.Tensor:
        return self._host[: shape[0] * shape[1] * shape[2]].view(shape)

    def array(self, shape: tuple[int, int, int]) -> np.ndarray:
        return self._view(shape).numpy()

    def wait(self) -> None:
        if self._placed is not None:
            self._placed.synchronize()

    def upload(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """The piece on the device, for work on the current stream; the copy runs beside what is queued there."""
        if self._copies is None:
            return self._view(shape).to(self._device)
        with torch.cuda.stream(self._copies):
            data = self._view(shape).to(self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._copies)
        data.record_stream(current)
        return data

    def release(self) -> None:
        """What was queued on the current stream until now is the last that reads the upload."""
        if self._placed is not None:
            self._placed.record()


def place(piece: Piece, raw: torch.Tensor) -> None:
    """Rearrange raw rows, uint8 [experts, rows, bytes a row] on the device, into the slab's planes."""
    target = piece.slab.target
    made = repack(target.format.name, raw, len(piece.slab.columns))
    for mine, theirs in zip(target.tensors, made.tensors, strict=True):
        mine[piece.e0 : piece.e1, :, :, piece.r0 : piece.r1].copy_(theirs)


def _zero_padding(slab: Slab) -> None:
    for plane in slab.target.tensors:
        plane[:, :, :, len(slab.rows) :].zero_()


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
