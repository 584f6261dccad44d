"""What bounds loading: reading alone, reading and copying to the device, both and rearranging, rearranging alone.

    python scripts/bench_loading.py [--layers 12] [--folder /dev/shm] [--out results.json] [--device cuda]

Writes a GGUF set of one rank's shapes (7 GB for 12 layers), and takes all its quantised tensors through parts of what
the loader does, from the page cache, with several numbers of reading threads. The loader's own course comes last. The
slowest part alone bounds it; where the whole is slower than every part, they disturb each other: their Python code
takes turns, for threads of one process share an interpreter. `waits` is the share of the time in which the thread that
feeds the device waits for a piece: near 0 reading is fast enough, near 1 nothing else matters.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from layer_stack.generate import write_stack
from layer_stack.stack import Stack

from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.planes import empty_planes
from glm5deploy.vllm_plugin.rank_files import Files
from glm5deploy.vllm_plugin.rank_reader import PIECE_BYTES, Reader, place
from glm5deploy.vllm_plugin.slabs import Piece, Slab, Source, pieces

Take = Callable[[Piece, torch.Tensor], object]
THREADS = (1, 2, 4, 8, 16)


def slabs_of(gguf: Path, device: str) -> list[Slab]:
    """Whole quantised matrices, with planes to receive them."""
    found = []
    for tensor in ShardSet.open(gguf).tensors:
        kind = tensor.type.name
        if len(tensor.shape) < 2 or kind not in FORMATS or FORMATS[kind].dense:
            continue
        columns, rows, experts = (*tensor.shape, 1)[:3]
        target = empty_planes(kind, rows, columns, experts, device)
        source = Source(tensor, tensor.name, rows, experts)
        found.append(Slab(source, target, range(experts), range(rows), range(columns)))
    return sorted(found, key=lambda s: (s.source.tensor.shard, s.source.tensor.offset))


def buffer_of(size: int, device: str) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device == "cuda")


def view(buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
    return buffer[: int(np.prod(piece.shape))].view(piece.shape)


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bring(slabs: list[Slab], threads: int, device: str, take: Take) -> dict[str, float]:
    """GB/s with so many threads that read and one that hands every piece to ``take``, in order."""
    files, queue = Files(), deque(piece for slab in slabs for piece in pieces(slab, PIECE_BYTES))
    files.open(slab.source.tensor.path for slab in slabs)
    size = max(int(np.prod(piece.shape)) for piece in queue)
    free = [buffer_of(size, device) for _ in range(threads + 1)]
    running: deque[tuple[Piece, torch.Tensor, Future[int]]] = deque()
    taken, waited, begun, used = 0, 0.0, time.monotonic(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        while queue or running:
            while queue and free:
                piece, buffer = queue.popleft(), free.pop()
                running.append((piece, buffer, pool.submit(files.copy, piece, view(buffer, piece).numpy())))
            piece, buffer, future = running.popleft()
            before = time.monotonic()
            taken += future.result()
            waited += time.monotonic() - before
            take(piece, view(buffer, piece))
            free.append(buffer)
    settle(device)
    spent = time.monotonic() - begun
    cores = (time.process_time() - used) / spent
    return {"threads": threads, "GB/s": taken / spent / 1e9, "waits": waited / spent, "cores": cores}


def rearrange(slabs: list[Slab], device: str, repeats: int) -> Iterable[dict[str, Any]]:
    """For one piece of every type that is on the device already: GB/s, and the host's share of the time."""
    for kind in sorted({slab.source.tensor.type.name for slab in slabs}):
        slab = max((s for s in slabs if s.source.tensor.type.name == kind), key=lambda s: s.nbytes)
        piece = next(pieces(slab, PIECE_BYTES))
        raw = torch.randint(0, 256, piece.shape, dtype=torch.uint8, device=device)
        place(piece, raw)
        settle(device)
        begun = time.monotonic()
        for _ in range(repeats):
            place(piece, raw)
        launched = time.monotonic() - begun
        settle(device)
        spent = time.monotonic() - begun
        yield {
            "type": kind,
            "MiB": raw.numel() / 2**20,
            "GB/s": repeats * raw.numel() / spent / 1e9,
            "ms a piece": 1e3 * spent / repeats,
            "ms of the host": 1e3 * launched / repeats,
        }


def nothing(piece: Piece, raw: torch.Tensor) -> None:
    """What becomes of a piece that was only to be brought."""


def copy_to(device: str, then: Take) -> Take:
    """Copies a piece there and waits, for its buffer is used again."""

    def take(piece: Piece, raw: torch.Tensor) -> None:
        then(piece, raw.to(device, non_blocking=True))
        settle(device)

    return take


def whole(slabs: list[Slab], device: str) -> dict[str, Any]:
    reader, begun = Reader(torch.device(device)), time.monotonic()
    taken = reader.fill(slabs)
    settle(device)
    spent = time.monotonic() - begun
    return {"GB/s": taken / spent / 1e9, "waits": reader.times.waited / spent, "times": str(reader.times)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--scale", choices=("real", "small"), default="real")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the file goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write the figures here, as they come")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the file in memory is removed then as well
    figures: list[dict[str, Any]] = []

    def keep(what: str, found: dict[str, Any]) -> None:
        figures.append({"what": what, **found})
        words = (f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
        print(f"{what:22}", "  ".join(words), flush=True)
        if chosen.out:
            chosen.out.write_text(json.dumps(figures, indent=1))

    folder = Path(tempfile.mkdtemp(prefix="loading-", dir=chosen.folder))
    try:
        (first, *_) = write_stack(folder, Stack(chosen.layers, chosen.scale))
        slabs = slabs_of(first, chosen.device)
        total = sum(slab.nbytes for slab in slabs)
        print(f"{total / 1e9:.2f} GB quantised in {chosen.folder}; {len(os.sched_getaffinity(0))} cores", flush=True)
        for found in rearrange(slabs, chosen.device, 20):
            keep("rearranging alone", found)
        for threads in THREADS:
            keep("reading", bring(slabs, threads, chosen.device, nothing))
        for threads in THREADS[2:]:
            keep(
                "reading, copying",
                bring(slabs, threads, chosen.device, copy_to(chosen.device, nothing)),
            )
        for threads in THREADS[2:]:
            keep("and rearranging", bring(slabs, threads, chosen.device, copy_to(chosen.device, place)))
        for _ in range(2):
            keep("the loader", whole(slabs, chosen.device))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
