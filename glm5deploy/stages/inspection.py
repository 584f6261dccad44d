"""What a model's headers say: set, keys, tensors, how the bytes are spread, which layers have an indexer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod
from pathlib import Path

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.gguf_files.header import Header, read_header
from glm5deploy.gguf_files.metadata import Metadata, ValueType
from glm5deploy.gguf_files.shard_checks import COUNT_KEY
from glm5deploy.gguf_files.shard_names import parse_shard_name
from glm5deploy.gguf_files.shards import ShardSet, ShardTensor
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE
from glm5deploy.glm_dsa.hparams import Hparams, read_hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.memory import sizes_by_role
from glm5deploy.glm_dsa.weight_types import ALWAYS_DENSE, require_readable
from glm5deploy.stages.gpu_memory import gpu_memory
from glm5deploy.stages.model_headers import FoundModel, open_headers

_LONGEST_TEXT = 160
_LONGEST_LIST = 12

Facts = dict[str, object]


def inspect_model(
    target: str, *, revision: str = "main", schedule: str | None = None, tensors: bool = False, keys: Iterable[str] = ()
) -> Facts:
    """Everything about the model at ``target``; ``keys`` are shown whole, ``tensors`` adds the table.

    A shard whose siblings are missing is described alone, with ``complete`` False and the ``problem``. Raises
    :class:`DeployError` for what cannot be read at all.
    """
    try:
        found = open_headers(target, revision)
    except FileFormatError as error:
        path = Path(target).expanduser()
        if not path.is_file():
            raise
        return _one_file(read_header(path), error, tensors=tensors, keys=keys)
    shards = found.shards
    facts = _summary(found)
    facts |= _architecture(shards, schedule)
    facts["metadata"] = _metadata(shards.metadata, keys)
    if tensors:
        facts["tensor_table"] = [_row(tensor) for tensor in shards.tensors]
    return facts


def _summary(found: FoundModel) -> Facts:
    shards = found.shards
    weights = sum(prod(tensor.shape) for tensor in shards.tensors)
    data = sum(tensor.nbytes for tensor in shards.tensors)
    facts: Facts = {"source": found.source}
    if found.remote:
        facts["commit"] = found.commit
    return facts | {
        "name": _short(shards.metadata, "general.name"),
        "architecture": _short(shards.metadata, "general.architecture"),
        "files": [
            {"file": path.name, "size": header.file_size, "tensors": len(header.tensors)}
            for path, header in zip(shards.paths, shards.headers, strict=True)
        ],
        "complete": True,
        "split": _split(shards.headers),
        "total_bytes": shards.file_bytes,
        "header_bytes": sum(len(header.raw) for header in shards.headers),
        "tensors": len(shards.tensors),
        "weights": weights,
        "bits_per_weight": round(8 * data / weights, 3) if weights else None,
        "types": _types(shards.tensors),
        **_on_a_gpu(shards),
    }


def _split(headers: tuple[Header, ...]) -> str:
    if len(headers) > 1:
        return f"{len(headers)} shards, all there and of one set"
    return "merged from shards" if COUNT_KEY in headers[0].metadata else "one file"


def _one_file(header: Header, error: FileFormatError, *, tensors: bool, keys: Iterable[str]) -> Facts:
    name = parse_shard_name(Path(header.name).name)
    facts: Facts = {
        "source": header.name,
        "architecture": _short(header.metadata, "general.architecture"),
        "complete": False,
        "split": f"shard {name.number} of {name.count}" if name else "a shard under another name",
        "problem": error.message,
        "hint": error.hint,
        "total_bytes": header.file_size,
        "header_bytes": len(header.raw),
        "tensors": len(header.tensors),
        "metadata": _metadata(header.metadata, keys),
    }
    if tensors:
        path = Path(header.name)
        facts["tensor_table"] = [
            _row(ShardTensor(t.name, t.type, t.shape, path, header.data_start + t.offset, t.nbytes, 0))
            for t in header.tensors
        ]
    return facts


def _architecture(shards: ShardSet, schedule: str | None) -> Facts:
    """What only a glm-dsa file has; for any other, why it is not one."""
    if shards.metadata.get("general.architecture") != ARCHITECTURE:
        return {"roles": [], "indexer": {"problem": f"not a {ARCHITECTURE} file"}}
    try:
        hparams = read_hparams(shards.metadata, shards.by_name)
    except DeployError as error:
        return {"roles": [], "indexer": {"problem": error.message}}
    return {"roles": _roles(shards, hparams), "indexer": _indexer(shards, hparams, schedule)}


def _roles(shards: ShardSet, hparams: Hparams) -> list[Facts]:
    return [
        {
            "role": size.role,
            "tensors": size.tensors,
            "bytes": size.nbytes,
            "bits_per_weight": round(size.bits_per_weight, 3),
            "types": ", ".join(f"{count} {name}" for name, count in size.types.items()),
        }
        for size in sizes_by_role(shards.tensors, hparams)
    ]


def _indexer(shards: ShardSet, hparams: Hparams, schedule: str | None) -> Facts:
    layers = [n for n in range(hparams.num_layers) if f"blk.{n}.indexer.attn_k.weight" in shards.by_name]
    facts: Facts = {"layers_with_tensors": len(layers), "layers": hparams.num_layers}
    try:
        resolved = resolve_schedule(hparams, shards.by_name, override=schedule)
    except DeployError as error:
        return facts | {"problem": error.message, "hint": error.hint}
    facts |= {"schedule": resolved.pattern, "decided_by": resolved.source}
    return facts | ({"warning": resolved.warning} if resolved.warning else {})


def _types(tensors: Iterable[ShardTensor]) -> str:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.nbytes
    total = sum(sizes.values())
    order = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {100 * size / total:.1f} %" for name, size in order)


def _on_a_gpu(shards: ShardSet) -> Facts:
    """What the weights take there, by type; of types that are refused, that they are."""
    dense = {tensor.name for tensor in shards.tensors if _kind(tensor.name) in ALWAYS_DENSE}
    memory = gpu_memory(shards.tensors, dense)
    facts: Facts = {"on_a_gpu": memory.sentence, "gpu_weights": memory.rows}
    try:
        require_readable(shards.tensors)
    except FileFormatError as error:
        facts["refused"] = error.message
    return facts


def _kind(name: str) -> str:
    """A tensor's name without its block: ``blk.3.attn_k_b.weight`` is an ``attn_k_b.weight``."""
    return re.sub(r"^blk\.\d+\.", "", name)


def _row(tensor: ShardTensor) -> Facts:
    return {
        "tensor": tensor.name,
        "type": tensor.type.name,
        "shape": " x ".join(map(str, tensor.shape)),
        "bytes": tensor.nbytes,
        "file": tensor.path.name,
        "offset": tensor.offset,
    }


def _metadata(metadata: Metadata, keys: Iterable[str]) -> Facts:
    whole = set(keys)
    unknown = sorted(whole - set(metadata))
    if unknown:
        raise FileFormatError(f"{metadata.name}: has no key {', '.join(unknown)}")
    return {key: metadata[key] if key in whole else _short(metadata, key) for key in metadata}


def _short(metadata: Metadata, key: str) -> object:
    """A value as one line: long arrays by their length, long texts cut, text that is not UTF-8 named as such."""
    entry = metadata.entries.get(key)
    if entry is None:
        return None
    if entry.type is ValueType.ARRAY and entry.count > _LONGEST_LIST:
        return f"{entry.count} values of {entry.element_type.name.lower()}"
    try:
        value = metadata[key]
    except FileFormatError:
        return "text that is not UTF-8"
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}… ({len(value)} characters)"
    return list(value) if isinstance(value, tuple) else value
