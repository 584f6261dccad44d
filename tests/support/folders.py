"""Model folders for tests, built from reference sets or from headers put together by hand."""

from __future__ import annotations

from pathlib import Path

from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.model_folder import ModelFolder, build_model_folder, write_model_folder


def folder_of(gguf: Path, *, schedule: str | None = None) -> ModelFolder:
    shards = ShardSet.open(gguf)
    files = [(path, path.stat().st_size) for path in shards.paths]
    return build_model_folder(shards.metadata, shards.tensors, files, schedule_override=schedule)


def write_folder_of(gguf: Path, target: Path, *, schedule: str | None = None) -> Path:
    write_model_folder(target, folder_of(gguf, schedule=schedule).files)
    return target
