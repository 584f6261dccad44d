"""The model folder: everything but weights that vLLM needs, as files with reproducible bytes.

``glm5_gguf.json`` tells our loader where the weights are. It is removed first and written last, so a folder with it is
a finished folder, whatever interrupted an earlier attempt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.files import sync_folder, write_atomically
from glm5deploy.glm_dsa.chat_template import read_chat_template
from glm5deploy.glm_dsa.hf_config import Json, build_config, build_generation_config
from glm5deploy.glm_dsa.hparams import Hparams, read_hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule, resolve_schedule
from glm5deploy.glm_dsa.metadata import Metadata
from glm5deploy.glm_dsa.tensor_names import NamedShape, TensorPlan, plan_tensors
from glm5deploy.glm_dsa.tokenizer import build_tokenizer, build_tokenizer_config, read_vocabulary

POINTER = "glm5_gguf.json"
POINTER_VERSION = 1
TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder not yet written: ``files`` by name, plus what was decided on the way."""

    hparams: Hparams
    schedule: IndexerSchedule
    plan: TensorPlan
    files: Mapping[str, bytes]
    warnings: tuple[str, ...]


def build_model_folder(
    metadata: Metadata,
    tensors: Sequence[NamedShape],
    gguf_files: Sequence[tuple[Path, int]],
    *,
    schedule_override: str | None = None,
) -> ModelFolder:
    """Every file of the folder, in memory. Nothing is written, so nothing is half done when a check fails.

    ``tensors`` is the table of all shards, ``gguf_files`` are the shards in order with their sizes in bytes.
    """
    names = frozenset(tensor.name for tensor in tensors)
    hparams = read_hparams(metadata, names)
    schedule = resolve_schedule(hparams, names, override=schedule_override)
    plan = plan_tensors(tensors, hparams, schedule, use_mtp=hparams.num_nextn > 0)
    vocabulary = read_vocabulary(metadata, hparams.vocab_size)
    template = read_chat_template(metadata)
    warnings = [schedule.warning] if schedule.warning else []
    if template is None:
        warnings.append(
            "the file has no chat template: /v1/completions will work, /v1/chat/completions needs --chat-template"
        )
    pointer: Json = {
        "version": POINTER_VERSION,
        "files": [str(path.absolute()) for path, _ in gguf_files],
        "sizes": [size for _, size in gguf_files],
        "index_topk_pattern": schedule.pattern,
        "schedule_source": schedule.source,
    }
    files = {
        "config.json": _json(build_config(hparams, schedule, metadata, tied_embeddings=plan.tied_embeddings)),
        "generation_config.json": _json(build_generation_config(metadata, hparams.vocab_size)),
        "tokenizer.json": _json(build_tokenizer(vocabulary)),
        "tokenizer_config.json": _json(build_tokenizer_config(vocabulary, metadata, hparams.context_length)),
        **({TEMPLATE: template.encode()} if template else {}),
        POINTER: _json(pointer),
    }
    return ModelFolder(hparams, schedule, plan, files, tuple(warnings))


def write_model_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` into ``folder``, each atomically and durably, the pointer last; other files there stay.

    A chat template that is no longer part of the model is removed: vLLM would pick it up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / POINTER).unlink(missing_ok=True)
    if TEMPLATE not in files:
        (folder / TEMPLATE).unlink(missing_ok=True)
    for name in sorted(files, key=lambda name: (name == POINTER, name)):
        if name == POINTER:
            sync_folder(folder)
        write_atomically(folder / name, files[name], sync_name=False)
    sync_folder(folder)


def _json(value: Json) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
