"""Shards with the real models' headers and sizes and no data: sparse files of hundreds of gigabytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from glm5deploy.demo.hub_repository import Blob
from tests.support.gguf_factory import ARRAY, BOOL, F32, I32, STRING, U16, U32, Value, payload, text
from tests.support.glm_catalogue import CatalogueTensor, real_metadata, real_tensors

_SHARD_BYTES = 45 * 10**9
_ALIGNMENT = 32
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


class UnhashedBlob(Blob):
    """A file whose hashes are made up from its name: hashing it would take minutes, and nobody downloads it."""

    @property
    def sha256(self) -> str:  # type: ignore[override]
        return self.source.name.encode().hex().rjust(64, "0")[-64:]

    @property
    def git_oid(self) -> str:  # type: ignore[override]
        return self.sha256[-40:]


def write_real_set(
    folder: Path, version: str = "5.2", *, layout: str = "all", types: dict[str, str] | None = None
) -> list[Path]:
    """The split set of GLM-``version``: shard 1 has the metadata alone, the others tensors of up to 45 GB."""
    folder.mkdir(parents=True)
    groups: list[list[CatalogueTensor]] = [[]]
    filled = _SHARD_BYTES
    for tensor in real_tensors(layout, types=types):
        if filled + tensor.nbytes > _SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    total = sum(map(len, groups))
    paths = []
    for number, tensors in enumerate(groups):
        keys: dict[str, Value] = {
            "split.no": (U16, number),
            "split.count": (U16, len(groups)),
            "split.tensors.count": (I32, total),
        }
        path = folder / f"GLM-{version}-UD-Q4_K_XL-{number + 1:05d}-of-{len(groups):05d}.gguf"
        _write(path, {**_model_keys(version), **keys} if number == 0 else keys, tensors)
        paths.append(path)
    return paths


def _model_keys(version: str) -> dict[str, Value]:
    metadata = real_metadata(version)
    size = int(str(metadata["glm-dsa.vocab_size"]))
    tokens = [*_byte_pieces(), *(f"x{i}" for i in range(size - 256 - len(_MARKERS))), *_MARKERS]
    types = [1] * (size - len(_MARKERS)) + [4] * len(_MARKERS)
    return {key: _typed(value) for key, value in metadata.items()} | {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "glm4"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, types)),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["x 1"])),
        "tokenizer.ggml.eos_token_id": (U32, size - 1),
        "tokenizer.chat_template": (STRING, "{{ messages[0].content }}"),
    }


def _byte_pieces() -> list[str]:
    """GPT-2's stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def _typed(value: object) -> Value:
    if isinstance(value, bool):
        return BOOL, value
    if isinstance(value, int):
        return U32, value
    return (F32, value) if isinstance(value, float) else (STRING, value)


def _write(path: Path, keys: dict[str, Value], tensors: Sequence[CatalogueTensor]) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    for key, (kind, value) in keys.items():
        head += text(key) + struct.pack("<I", kind) + payload(kind, value)
    offset = 0
    for tensor in tensors:
        shape = struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        head += text(tensor.name) + struct.pack("<I", len(tensor.shape)) + shape
        head += struct.pack("<IQ", tensor.type.id, offset)
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // _ALIGNMENT) * _ALIGNMENT + offset)
