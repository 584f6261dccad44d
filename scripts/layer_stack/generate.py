"""The stack's GGUF file as a set of shards, written in parallel from pools of random blocks.

A pool holds a few megabytes of valid random blocks of one type with the standard deviation that keeps a product's
output at the size of its input. Every tensor is written from places of its pool that its name picks, so that layers
differ, and 54 GB take as long as the memory or disk below needs.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from glm5deploy.demo.random_blocks import K_QUANTS, random_k_quants
from glm5deploy.demo.written_model import add_metadata
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE
from glm5deploy.glm_dsa.tensor_names import Placement

from .stack import Stack
from .vocabulary import vocabulary

SHARDS = 12  # besides the first, which has no tensors; each is written by a thread of its own
_POOL_WEIGHTS = 1 << 23
_WRITE = 8 << 20
_SEED = 6
_LOGITS = 4.0  # standard deviation of the logits: some tokens are likelier than others


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file; ``deviation`` is its weights' standard deviation, ``mean`` that of a vector's values."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    deviation: float
    mean: float

    @classmethod
    def of(cls, placement: Placement, stack: Stack) -> Tensor:
        kind, stem = stack.type_of(placement), placement.kind.gguf
        if len(placement.shape) == 1:
            norm = "norm.weight" in stem
            deviation, mean = (0.05, 1.0) if norm else (0.0, 0.0)
        else:
            # attn_k_b lies transposed: its inputs are the latent's values, the second dimension.
            inputs = placement.shape[1] if stem == "attn_k_b.weight" else placement.shape[0]
            deviation, mean = inputs**-0.5 * (_LOGITS if stem == "output.weight" else 1.0), 0.0
        nbytes = TYPES_BY_NAME[kind].nbytes(math.prod(placement.shape))
        return cls(placement.name, kind, placement.shape, nbytes, deviation, mean)


def tensors_of(stack: Stack) -> list[Tensor]:
    return [Tensor.of(placement, stack) for placement in stack.placements()]


def file_bytes(stack: Stack) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors_of(stack))


def write_stack(
    folder: Path,
    stack: Stack,
    note: Callable[[str], None] = lambda _: None,
    headers_done: Callable[[tuple[Path, ...]], None] = lambda _: None,
) -> tuple[Path, ...]:
    """Write the shards into ``folder`` and return them in order; the bytes depend on ``stack`` alone.

    ``headers_done`` is called when the files have their headers and sizes, and their weights are still to come.
    """
    tensors = tensors_of(stack)
    total = sum(tensor.nbytes for tensor in tensors)
    largest = max(tensor.nbytes for tensor in tensors)
    writer = gguf.GGUFWriter(
        folder / f"GLM-{stack.version}-rank-UD-Q4_K_XL.gguf",
        ARCHITECTURE,
        split_max_size=max(total // SHARDS, largest) + 1,
        small_first_shard=True,
    )
    name = f"One of eight ranks of GLM-{stack.version}, random"
    add_metadata(writer, name, stack.keys, stack.schedule, vocabulary(int(stack.keys["vocab_size"])))
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = _Pools()
    for tensor in tensors:
        pools.prepare(tensor)
    note(f"{len(tensors)} tensors, {total / 1e9:.2f} GB, {len(pools)} pools of random blocks made")
    by_name = {tensor.name: tensor for tensor in tensors}
    shards = []
    for file, table in zip(writer.fout or (), writer.tensors, strict=True):
        places = _places(gguf.GGUFWriter.ggml_pad(file.tell(), writer.data_alignment), [by_name[n] for n in table])
        os.ftruncate(file.fileno(), places[-1][0] + places[-1][1].nbytes if places else file.tell())
        shards.append((file.fileno(), places))
    files = tuple(Path(file.name) for file in writer.fout or ())
    headers_done(files)
    with ThreadPoolExecutor(SHARDS) as threads:
        for job in [threads.submit(_write_shard, *shard, pools) for shard in shards]:
            job.result()
    writer.close()
    return files


def _places(offset: int, tensors: list[Tensor]) -> list[tuple[int, Tensor]]:
    found = []
    for tensor in tensors:
        found.append((offset, tensor))
        offset = gguf.GGUFWriter.ggml_pad(offset + tensor.nbytes, gguf.GGUF_DEFAULT_ALIGNMENT)
    return found


def _write_shard(file: int, places: list[tuple[int, Tensor]], pools: _Pools) -> None:
    for at, tensor in places:
        for part in pools.parts(tensor):
            done = 0
            while done < len(part):
                done += os.pwrite(file, part[done : done + _WRITE], at + done)
            at += len(part)


class _Pools:
    """Random blocks by type and standard deviation, as bytes."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, float], memoryview] = {}

    def __len__(self) -> int:
        return len(self._pools)

    def prepare(self, tensor: Tensor) -> None:
        key = (tensor.kind, tensor.deviation)
        if len(tensor.shape) > 1 and key not in self._pools:
            rng = np.random.default_rng([_SEED, len(self._pools)])
            self._pools[key] = memoryview(_blocks(rng, *key).reshape(-1).view(np.uint8)).toreadonly()

    def parts(self, tensor: Tensor) -> Iterator[memoryview]:
        """The tensor's bytes: runs of its pool from random blocks on."""
        rng = np.random.default_rng([_SEED, zlib.crc32(tensor.name.encode())])
        if len(tensor.shape) == 1:
            values = tensor.mean + tensor.deviation * rng.standard_normal(tensor.shape, dtype=np.float32)
            yield memoryview(values.astype(np.float32).view(np.uint8))
            return
        pool = self._pools[tensor.kind, tensor.deviation]
        block = TYPES_BY_NAME[tensor.kind].block_bytes
        left = tensor.nbytes
        while left:
            start = int(rng.integers(0, len(pool) // block)) * block
            part = pool[start : start + left]
            left -= len(part)
            yield part


def _blocks(rng: np.random.Generator, kind: str, deviation: float) -> np.ndarray:
    if kind in K_QUANTS:
        return random_k_quants(rng, (_POOL_WEIGHTS // 256, 256), kind, deviation)
    values = rng.standard_normal((_POOL_WEIGHTS // 256, 256), dtype=np.float32) * np.float32(deviation)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
