"""Bytes of a rank's slabs, out of the files into host buffers.

Whole rows are read straight into the buffer, which from the page cache is faster by half than copying them out of a
mapping. Cuts along a row take a few hundred bytes out of each row. Those are copied out of a mapping, whose pages are
given back at once: only they are copied and counted, but the file system reads whole pages, which on one machine all
ranks share through the page cache. So neither mappings nor buffers let the process grow with the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from glm5deploy.errors import FileFormatError
from glm5deploy.vllm_plugin.slabs import Piece

_PAGE = mmap.PAGESIZE


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
        count, height = piece.r1 - piece.r0, source.height or source.rows
        read = here.stop - here.start == width and not piece.transcoded
        bytes_taken = 0
        for i, j in _runs(slab.experts[piece.e0 : piece.e1], read and count == height):
            row = slab.experts[piece.e0 + i] * height + source.first + slab.rows.start + piece.r0
            start, size = tensor.offset + row * width, (j - i) * count * width
            if start + size > len(mapped):
                raise FileFormatError(
                    f"{tensor.path} ends inside of {tensor.name}", hint="`glm5deploy fetch` mends it."
                )
            if read:
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
                _read(file, out[i:j].reshape(-1), start)
                bytes_taken += size
                continue
            _advise(mapped, mmap.MADV_WILLNEED, start, size)
            stored = np.frombuffer(mapped, np.uint8, size, start).reshape(count, width)[:, here]
            if piece.transcoded:
                numbers = dequantize(np.array(stored), GGMLQuantizationType(tensor.type.id))
                out[i] = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy()
            else:
                np.copyto(out[i], stored)
            bytes_taken += stored.size
            del stored
            _advise(mapped, mmap.MADV_DONTNEED, start, size)
        return bytes_taken


def _runs(experts: Sequence[int], together: bool) -> Iterator[tuple[int, int]]:
    """Positions [i, j) that lie one after the other in the file: neighbours ``together``, else each alone.

    Few calls matter: the threads that read share an interpreter with the one that hands pieces to the device.
    """
    i = 0
    for j in range(1, len(experts) + 1):
        if j == len(experts) or not together or experts[j] != experts[j - 1] + 1:
            yield i, j
            i = j


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
