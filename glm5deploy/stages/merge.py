"""merge: one GGUF file out of the shards, or the checked set as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from glm5deploy.errors import DeployError
from glm5deploy.files import changed_files, file_facts, free_bytes
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.journal import load_journal
from glm5deploy.gguf_files.merge_job import journal_path
from glm5deploy.gguf_files.merge_options import MergeOptions, Mode
from glm5deploy.gguf_files.merge_plan import plan_merge
from glm5deploy.gguf_files.shard_checks import COUNT_KEY, TENSORS_KEY
from glm5deploy.gguf_files.shard_names import parse_shard_name
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.sizes import human_bytes
from glm5deploy.stages.fetched import fetched_shards, require_unchanged
from glm5deploy.stages.released import MERGED, Release, announce_release, release_of


class MergeStage:
    """Reruns when the shards, the mode or the output changed, or the output is not as it was left.

    Its outputs name the files to load, merged or not: ``files`` in shard order, each with path, size and mtime.
    """

    name = "merge"

    def __init__(self, *, io: Mode = "auto", redo: bool = False) -> None:
        self._io = io
        self._redo = redo

    def inputs(self, context: Context) -> Json:
        shards = [[s.path.name, s.size, s.sha256, s.mtime_ns] for s in fetched_shards(context)]
        return {
            "shards": hashlib.sha256(json.dumps(shards).encode()).hexdigest(),
            "mode": context.config.merge.mode,
            "output": str(_output(context)),
        }

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        return changed_files(outputs.get("files"))

    def plan(self, context: Context) -> Json:
        output = _output(context)
        if _take_over(context, output) is not None:
            return {"would": "keep the merged file, its shards are released", "output": str(output)}
        if _is_releasing(context, output):
            return {"would": "finish the interrupted merge --consume", "output": str(output), "consume": True}
        shards = _open(context)
        kind, why = _decide(context, shards, output)
        if kind != "merged":
            return {"would": f"load the {len(shards.paths)} files as they are", "because": why}
        plan = plan_merge(shards)
        return {
            "would": f"merge {len(shards.paths)} shards",
            "output": str(output),
            "bytes": plan.size,
            "free_bytes": free_bytes(output.parent),
            "tensors": len(plan.tensors),
            "consume": context.config.merge.consume,
        }

    def run(self, context: Context) -> Json:
        output = _output(context)
        taken_over = _take_over(context, output)
        if taken_over is not None:
            return taken_over
        if _is_releasing(context, output):
            return self._merge(context, output)
        shards = _open(context)
        require_unchanged(context)
        kind, why = _decide(context, shards, output)
        if kind != "merged":
            context.events.note(f"not merging: {why}")
            return _outputs(kind, shards.paths, f"{len(shards.paths)} files checked, not merged: {why}")
        output.parent.mkdir(parents=True, exist_ok=True)
        if context.config.merge.consume:
            announce_release(context.workdir, Release({s.path: s.sha256 for s in fetched_shards(context)}, output))
        return self._merge(context, output)

    def _merge(self, context: Context, output: Path) -> Json:
        config = context.config.merge
        options = MergeOptions(
            mode=self._io,
            chunk_bytes=config.chunk_bytes,
            verify=config.verify,
            consume=config.consume,
            existing="redo" if self._redo else "refuse" if config.output else "replace",
            check_mix=False,
        )
        source = fetched_shards(context)[0].path
        result = merge(source, output, options, progress=context.events.progress, checkpoint=context.events.checkpoint)
        how = {"none": "was merged already", "direct": "copied past the page cache", "buffered": "copied"}[result.mode]
        if result.cloned:
            how += f", {human_bytes(result.cloned)} shared with the shards"
        if result.sha256:
            how += f", {len(result.sha256)} tensors verified"
        return _outputs("merged", (output,), f"{output}: {human_bytes(result.nbytes)}, {how}")


def _open(context: Context) -> ShardSet:
    """The fetched set. Types are not compared: fetch has checked every shard's hash against one commit."""
    return ShardSet.open(fetched_shards(context)[0].path, check_mix=False)


def _output(context: Context) -> Path:
    first = fetched_shards(context)[0].path
    name = parse_shard_name(first.name)
    named = context.config.merge.output
    if named is not None:
        return named.expanduser().absolute()
    return context.workdir / MERGED / f"{name.prefix if name else first.stem}.gguf"


def _decide(context: Context, shards: ShardSet, output: Path) -> tuple[str, str]:
    """merged, shards or single, and why."""
    config = context.config.merge
    if len(shards.paths) == 1:
        return "single", "the model is a single file already"
    if config.mode == "never":
        return "shards", "the engine reads the shards themselves"
    if config.mode == "auto" and not config.consume and not output.exists() and not journal_path(output).exists():
        free, needed = free_bytes(output.parent), shards.file_bytes
        if free < needed + needed // 50:
            return "shards", f"merging needs {human_bytes(needed)}, {human_bytes(free)} are free"
    return "merged", ""


def _take_over(context: Context, output: Path) -> Json | None:
    """The result of a ``--consume`` merge that was finished, shards gone, but not recorded."""
    release = release_of(context.workdir)
    if release is None or release.output != output or journal_path(output).exists() or not output.exists():
        return None
    if release.shards != _contents(context) or any(path.exists() for path in release.shards):
        return None
    metadata = ShardSet.open(output).metadata
    if metadata.integer(COUNT_KEY) != 0 or metadata.integer(TENSORS_KEY) is None:
        return None
    return _outputs("merged", (output,), f"{output}: merged before, shards released")


def _is_releasing(context: Context, output: Path) -> bool:
    """Whether a ``--consume`` merge of these shards into ``output`` was interrupted; raises if it was of others."""
    release, state = release_of(context.workdir), load_journal(journal_path(output))
    if release is None or release.output != output or state is None or not state.consume:
        return False
    if release.shards != _contents(context):
        raise DeployError(
            f"{output}: an interrupted merge --consume of other shards, of another commit perhaps, is here",
            hint=f"fetch that commit again to finish it, or delete {journal_path(output)} and the .partial beside it",
        )
    return True


def _contents(context: Context) -> dict[Path, str]:
    return {shard.path: shard.sha256 for shard in fetched_shards(context)}


def _outputs(kind: str, paths: tuple[Path, ...], summary: str) -> Json:
    facts = [file_facts(path) for path in paths]
    return {"kind": kind, "files": facts, "bytes": sum(int(str(f["size"])) for f in facts), "summary": summary}
