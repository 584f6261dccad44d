"""From files to planes on the device: each rank brings its own bytes, a few megabytes at a time.

A *slab* is one rank's part of one stored tensor and the planes it fills. Slabs are cut into pieces; threads bring the
next pieces into pinned buffers while the device rearranges the one before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from glm5deploy.quants.planes import repack
from glm5deploy.vllm_plugin.device_memory import blocks_reused, give_back_spare
from glm5deploy.vllm_plugin.rank_files import Files
from glm5deploy.vllm_plugin.slabs import Piece, Slab, pieces

PIECE_BYTES = 16 << 20  # of a piece: bounds the buffers and what rearranging takes on the device
_BUFFERS = 8  # pieces under way at a time, each with a thread that reads
_LOOK_EVERY = 32  # pieces after which the device's spare memory is looked at


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a run: the thread that feeds the device ``waited`` for pieces; all threads that read, together, waited
    for the ``device`` to be done with their buffers, and ``read``."""

    waited: float = 0.0
    device: float = 0.0
    read: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(self.waited + other.waited, self.device + other.device, self.read + other.read)

    def __str__(self) -> str:
        readers = f"{_BUFFERS} readers read for {self.read:.1f} s and waited {self.device:.1f} s for the device"
        return f"the device's feeder waited {self.waited:.1f} s for them; {readers}, all together"


class Reader:
    """Fills slabs, ``most`` bytes at a time. ``report`` gets (bytes taken, bytes in all) after every piece.

    ``times`` are seconds, of what bounds the rate: little ``waited`` means the thread that feeds the device itself.
    """

    def __init__(
        self,
        device: torch.device,
        report: Callable[[int, int], None] = lambda taken, total: None,
        most: int = PIECE_BYTES,
    ) -> None:
        self.device = device
        self.files = Files()
        self.times = Times()
        self._report = report
        self._most = most

    def fill(self, slabs: Sequence[Slab]) -> int:
        """Fill every slab's planes, in the order of the file; returns the bytes copied from it."""
        slabs = sorted(slabs, key=lambda s: (s.source.tensor.shard, s.source.tensor.offset))
        self.files.open(slab.source.tensor.path for slab in slabs)
        total = sum(slab.nbytes for slab in slabs)
        with blocks_reused(self.device):
            self._fill(slabs, total)
        give_back_spare(self.device)
        return self.files.taken

    def _fill(self, slabs: Sequence[Slab], total: int) -> None:
        for slab in slabs:
            _zero_padding(slab)
        queue = deque(piece for slab in slabs for piece in pieces(slab, self._most))
        size = max((int(np.prod(piece.shape)) for piece in queue), default=0)
        with ThreadPoolExecutor(_BUFFERS) as pool:
            copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            free = [_Buffer(size, self.device, copies) for _ in range(min(_BUFFERS, len(queue)))]
            running: deque[tuple[Piece, _Buffer, Future[tuple[int, Times]]]] = deque()
            while queue or running:
                while queue and free:
                    piece, buffer = queue.popleft(), free.pop()
                    running.append((piece, buffer, pool.submit(self._bring, piece, buffer)))
                piece, buffer, future = running.popleft()
                before = time.perf_counter()
                taken, times = future.result()
                self.files.taken += taken
                self.times += replace(times, waited=time.perf_counter() - before)
                place(piece, buffer.upload(piece.shape))
                buffer.release()
                free.append(buffer)
                self._report(self.files.taken, total)
                if len(queue) % _LOOK_EVERY == 0:
                    give_back_spare(self.device)

    def _bring(self, piece: Piece, buffer: _Buffer) -> tuple[int, Times]:
        """Runs in a thread: the one that hands pieces to the device never waits for a buffer."""
        begun = time.perf_counter()
        buffer.wait()
        free = time.perf_counter()
        taken = self.files.copy(piece, buffer.array(piece.shape))
        return taken, Times(device=free - begun, read=time.perf_counter() - free)


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
