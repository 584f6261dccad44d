"""From a model folder to its weights: ``glm5_gguf.json``, the GGUF files it names, and the plan of their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.shards import ShardSet, ShardTensor
from glm5deploy.glm_dsa.hparams import Hparams, read_hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.name_ranges import collapse
from glm5deploy.glm_dsa.tensor_names import TensorPlan, plan_tensors
from glm5deploy.glm_dsa.weight_types import require_readable

MANIFEST = "glm5_gguf.json"
_MOST_BYTES = 1 << 20
_PATCH_AGAIN = "Run `glm5deploy patch` again: it writes the model folder for the files as they are."


@dataclass(frozen=True)
class ModelFiles:
    """The open, checked files of a model folder; ``pattern`` is the indexer schedule they are to be served with."""

    shards: ShardSet
    hparams: Hparams
    pattern: str

    @classmethod
    def open(cls, folder: Path) -> ModelFiles:
        """Read the manifest and the headers; :class:`FileFormatError` names what is absent, changed or damaged."""
        manifest = read_manifest(folder)
        files = tuple(Path(name) for name in manifest["files"])
        for file, size in zip(files, manifest["sizes"], strict=True):
            if not file.is_file():
                raise FileFormatError(f"{folder / MANIFEST} names {file}, which does not exist", hint=_PATCH_AGAIN)
            if file.stat().st_size != size:
                raise FileFormatError(
                    f"{file} has {file.stat().st_size} bytes, {folder / MANIFEST} was made for {size}",
                    hint=_PATCH_AGAIN,
                )
        # The stage that wrote the manifest has judged the mix of types; the sizes tell another shard apart.
        shards = ShardSet.open(files[0], check_mix=False)
        if tuple(path.resolve() for path in shards.paths) != tuple(file.resolve() for file in files):
            raise FileFormatError(
                f"{folder / MANIFEST} names {len(files)} files, {files[0].name} belongs to a set of "
                f"{len(shards.paths)} in {files[0].parent}",
                hint=_PATCH_AGAIN,
            )
        return cls(shards, read_hparams(shards.metadata, shards.by_name), manifest["index_topk_pattern"])

    def plan(self, pattern: Any, *, use_mtp: bool = False) -> TensorPlan:
        """Place every tensor for a model that was built with the schedule ``pattern``.

        Raises :class:`FileFormatError` when ``pattern`` is not the folder's own, when tensors are missing, unknown or
        misshapen, or when a type is refused or cannot be dequantised.
        """
        if pattern != self.pattern:
            raise FileFormatError(
                f"the model was built with index_topk_pattern {pattern!r}, {MANIFEST} says {self.pattern!r}",
                hint="config.json and glm5_gguf.json must agree. " + _PATCH_AGAIN,
            )
        plan = plan_tensors(self.shards.tensors, self.hparams, IndexerSchedule(self.pattern, "option"), use_mtp=use_mtp)
        require_readable(self.shards.by_name[placement.name] for placement in plan.used)
        require_dequantisable(self.shards.by_name[placement.name] for placement in plan.used)
        return plan


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checked content of ``glm5_gguf.json``: files, sizes, index_topk_pattern."""
    path = folder / MANIFEST
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        manifest = json.loads(text) if len(text) <= _MOST_BYTES else None
    except OSError as error:
        raise FileFormatError(
            f"{path} cannot be read: {error.strerror}; without it the weights' place is unknown", hint=_PATCH_AGAIN
        ) from error
    except ValueError as error:
        raise FileFormatError(f"{path} is not JSON: {error}", hint=_PATCH_AGAIN) from error
    if not isinstance(manifest, dict) or manifest.get("version") != 1:
        raise FileFormatError(f"{path} is not a version-1 list of weight files", hint=_PATCH_AGAIN)
    files, sizes = manifest.get("files"), manifest.get("sizes")
    if (
        not isinstance(files, list)
        or not isinstance(sizes, list)
        or not files
        or len(files) != len(sizes)
        or not all(isinstance(name, str) and Path(name).is_absolute() for name in files)
        or not isinstance(manifest.get("index_topk_pattern"), str)
    ):
        raise FileFormatError(
            f"{path} must hold files (absolute paths), their sizes and index_topk_pattern", hint=_PATCH_AGAIN
        )
    return manifest


def require_dequantisable(tensors: Iterable[ShardTensor]) -> None:
    """:class:`FileFormatError` naming every tensor of a type that gguf-py cannot turn into numbers."""
    usable: dict[int, bool] = {}
    refused: dict[str, list[str]] = {}
    for tensor in tensors:
        kind = tensor.type
        if kind.id not in usable:
            usable[kind.id] = _can_dequantise(kind.id, kind.block_bytes)
        if not usable[kind.id]:
            refused.setdefault(kind.name, []).append(tensor.name)
    if refused:
        words = "; ".join(f"{name}: {collapse(names)}" for name, names in refused.items())
        raise FileFormatError(f"no dequantisation for these types: {words}", hint="Choose another quantisation.")


def _can_dequantise(type_id: int, block_bytes: int) -> bool:
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType(type_id))
    except (NotImplementedError, ValueError):
        return False
    return True
