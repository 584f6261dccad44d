"""Small GGUF shard sets with real headers and arbitrary payload, for tests that move bytes rather than models."""

from __future__ import annotations

import random
import struct
from pathlib import Path

_UINT16, _INT32, _STRING = 2, 5, 8
_I8 = 24
_ALIGNMENT = 32


def gguf_head(size: int, *, number: int = 0, count: int = 1, tensors: int = 1, name: str = "blk.0.data") -> bytes:
    """A header with ``split.*`` keys (left out for a set of one) and one I8 tensor of ``size`` bytes that follow it."""
    pairs = [_pair("general.architecture", _STRING, _text("glm-dsa"))] if number == 0 else []
    if count > 1:
        pairs += [
            _pair("split.no", _UINT16, struct.pack("<H", number)),
            _pair("split.count", _UINT16, struct.pack("<H", count)),
            _pair("split.tensors.count", _INT32, struct.pack("<i", tensors)),
        ]
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs)
    head += _text(name) + struct.pack("<IQIQ", 1, size, _I8, 0)
    return head + bytes(-len(head) % _ALIGNMENT)


def write_set(folder: Path, stem: str, sizes: list[int], *, seed: int = 0) -> list[Path]:
    """A split set (or one file) with ``sizes[i]`` payload bytes in shard i, the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index, size in enumerate(sizes):
        suffix = f"-{index + 1:05d}-of-{len(sizes):05d}" if len(sizes) > 1 else ""
        path = folder / f"{stem}{suffix}.gguf"
        payload = random.Random(f"{seed} {stem} {index}").randbytes(size)
        head = gguf_head(size, number=index, count=len(sizes), tensors=len(sizes), name=f"blk.{index}.data")
        path.write_bytes(head + payload + bytes(-size % _ALIGNMENT))
        paths.append(path)
    return paths


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _pair(key: str, type_: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", type_) + value
