"""merge: one GGUF file out of the shards, or the checked set as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from glm5deploy.errors import FileFormatError
from glm5deploy.files import changed_file, file_facts
from glm5deploy.gguf_files.copy import merge
from glm5deploy.gguf_files.merge_job import journal_path
from glm5deploy.gguf_files.merge_options import MergeOptions, Mode
from glm5deploy.gguf_files.merge_plan import plan_merge
from glm5deploy.gguf_files.shard_checks import COUNT_KEY, TENSORS_KEY
from glm5deploy.gguf_files.shards import ShardSet, parse_shard_name
from glm5deploy.gguf_files.space import free_bytes
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.stages.released import announce_release, released_into


class MergeStage:
    """Reruns when the shards, the mode or the output changed, or the output is not as it was left.

    Its outputs name the files to load, merged or not: ``files`` in shard order, each with path, size and mtime.
    """

    name = "merge"

    def __init__(self, *, io: Mode = "auto", redo: bool = False) -> None:
        self._io = io
        self._redo = redo

    def inputs(self, context: Context) -> Json:
        shards = [[Path(path).name, size, sha256] for path, size, sha256 in _fetched(context)]
        return {
            "shards": hashlib.sha256(json.dumps(shards).encode()).hexdigest(),
            "mode": context.config.merge.mode,
            "output": str(context.config.merge.output or ""),
        }

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        files = outputs.get("files")
        if not isinstance(files, list) or not files:
            return ["the record names no files"]
        reasons = (changed_file(facts) for facts in files if isinstance(facts, Mapping))
        return [reason for reason in reasons if reason is not None]

    def plan(self, context: Context) -> Json:
        shards = _open(context)
        output = _output(context)
        kind, why = _decide(context, shards, output)
        if kind != "merged":
            return {"would": f"load the {len(shards.paths)} files as they are", "because": why}
        plan = plan_merge(shards)
        return {
            "would": f"merge {len(shards.paths)} shards",
            "output": str(output),
            "bytes": plan.size,
            "free_bytes": free_bytes(_existing(output.parent)),
            "tensors": len(plan.tensors),
            "consume": context.config.merge.consume,
        }

    def run(self, context: Context) -> Json:
        output = _output(context)
        taken_over = _take_over(context, output)
        if taken_over is not None:
            return taken_over
        if journal_path(output).exists() and released_into(context) is not None:
            return self._merge(context, output)
        shards = _open(context)
        kind, why = _decide(context, shards, output)
        if kind != "merged":
            context.events.note(f"not merging: {why}")
            return _outputs(kind, shards.paths, f"{len(shards.paths)} files checked, not merged: {why}")
        output.parent.mkdir(parents=True, exist_ok=True)
        if context.config.merge.consume:
            announce_release(context, shards.paths, output)
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
        source = Path(_fetched(context)[0][0])
        result = merge(source, output, options, progress=context.events.progress, checkpoint=context.events.checkpoint)
        how = {"none": "was merged already", "direct": "copied past the page cache", "buffered": "copied"}[result.mode]
        if result.cloned:
            how += f", {result.cloned} bytes shared with the shards"
        if result.sha256:
            how += f", {len(result.sha256)} tensors verified"
        return _outputs("merged", (output,), f"{output}: {result.nbytes} bytes, {how}")


def _fetched(context: Context) -> list[tuple[str, int, str]]:
    """Path, size and sha256 of each shard that fetch recorded, in shard order."""
    files = context.require("fetch").get("files")
    if not isinstance(files, list) or not files:
        raise FileFormatError("the record of fetch names no files", hint="glm5deploy fetch --force")
    return [(str(f["path"]), int(f["size"]), str(f.get("sha256") or "")) for f in files]


def _open(context: Context) -> ShardSet:
    """The fetched set. Types are not compared: fetch has checked every shard's hash against one commit."""
    return ShardSet.open(Path(_fetched(context)[0][0]), check_mix=False)


def _output(context: Context) -> Path:
    first = Path(_fetched(context)[0][0])
    name = parse_shard_name(first.name)
    named = context.config.merge.output
    if named is not None:
        return named.expanduser().absolute()
    return context.workdir / "merged" / f"{name.prefix if name else first.stem}.gguf"


def _decide(context: Context, shards: ShardSet, output: Path) -> tuple[str, str]:
    """merged, shards or single, and why."""
    config = context.config.merge
    if len(shards.paths) == 1:
        return "single", "the model is a single file already"
    if config.mode == "never":
        return "shards", "the engine reads the shards themselves"
    if config.mode == "auto" and not config.consume and not output.exists() and not journal_path(output).exists():
        free, needed = free_bytes(_existing(output.parent)), shards.file_bytes
        if free < needed + needed // 50:
            return "shards", f"merging needs {needed} bytes, {free} are free"
    return "merged", ""


def _take_over(context: Context, output: Path) -> Json | None:
    """The result of a ``--consume`` merge that was finished, shards gone, but not recorded."""
    released = released_into(context)
    if released is None or released[1] != output or journal_path(output).exists() or not output.exists():
        return None
    if any(path.exists() for path in released[0]):
        return None
    metadata = ShardSet.open(output).metadata
    if metadata.integer(COUNT_KEY) != 0 or metadata.integer(TENSORS_KEY) is None:
        return None
    return _outputs("merged", (output,), f"{output}: merged before, shards released")


def _existing(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _outputs(kind: str, paths: tuple[Path, ...], summary: str) -> Json:
    facts = [file_facts(path) for path in paths]
    return {"kind": kind, "files": facts, "bytes": sum(int(str(f["size"])) for f in facts), "summary": summary}
