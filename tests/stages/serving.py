"""A work folder in which serving set A can begin, without the hub and without the engine's probes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm5deploy.config import load_config
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.model_folder import build_model_folder, write_model_folder
from glm5deploy.pipeline.events import Event, Events, StageEvents
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.stages.install import installed_versions
from tests.support.data import SET_A

SHARDS = SET_A / "GLM-tiny-A-GGUF" / "UD-Q4_K_XL"


def serve_context(workdir: Path, flags: Mapping[str, object], seen: list[Event] | None = None) -> Context:
    """The context of serve after patch and install of set A on the CPU engine."""
    shards = ShardSet.open(SHARDS)
    model = build_model_folder(shards.metadata, shards.tensors, [(path, path.stat().st_size) for path in shards.paths])
    write_model_folder(workdir / "model", model.files)
    outputs: dict[str, Json] = {
        "patch": {"folder": str(workdir / "model"), "index_topk": 64},
        "install": {
            "attention": "triton",
            "backend": "GLM5_TRITON_SPARSE",
            "device": {"type": "cpu", "name": "CPU"},
            "versions": installed_versions(),
        },
    }
    (workdir / ".glm5deploy").mkdir(exist_ok=True)
    sink = seen if seen is not None else []
    config: Any = load_config(None, {}, {"model.repo": "local/GLM-tiny-A-GGUF", **flags})
    return Context(workdir, config, StageEvents(Events(sink.append), "serve"), outputs)
