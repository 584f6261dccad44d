"""``merge``: one file out of the shards, as a stage or alone with ``--from``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, DryRunOpt, ForceOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session, current_output
from glm5deploy.errors import UsageError
from glm5deploy.sizes import human_bytes

if TYPE_CHECKING:
    from glm5deploy.gguf_files.merge_options import MergeOptions


def merge(
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="SHARD", help="Merge this set alone: any of its shards, or its folder."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The merged file. Default: in the work folder.")
    ] = None,
    no_merge: Annotated[bool, typer.Option("--no-merge", help="Check the set, load the shards as they are.")] = False,
    mode: Annotated[
        Literal["always", "auto", "never"] | None,
        typer.Option(help="auto merges unless the disk is too full; never is --no-merge."),
    ] = None,
    consume: Annotated[
        bool | None, typer.Option("--consume", help="Release the shards on the way: one shard's room is enough.")
    ] = None,
    verify: Annotated[
        bool | None, typer.Option("--verify", help="Hash every tensor and compare with what was written.")
    ] = None,
    chunk_bytes: Annotated[
        int | None, typer.Option(min=4096, help="Bytes a read or write. Default: 128 KiB, 4 MiB with O_DIRECT.")
    ] = None,
    io: Annotated[
        Literal["auto", "buffered", "direct"],
        typer.Option(help="Through the page cache or past it; auto decides by the memory."),
    ] = "auto",
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="With --from: do not compare the shards' quantisation types.")
    ] = False,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Merge the shards into one file, byte for byte what llama-gguf-split makes, resumable at any point."""
    if no_merge and mode not in (None, "never"):
        raise UsageError(f"--no-merge contradicts --mode {mode}")
    if source is not None:
        if no_merge or mode is not None:
            raise UsageError(
                "--from always merges", hint="leave --no-merge and --mode away, or use `glm5deploy inspect`"
            )
        from glm5deploy.gguf_files.merge_options import MergeOptions

        options = MergeOptions(
            mode=io,
            chunk_bytes=chunk_bytes or 0,
            verify=bool(verify),
            consume=bool(consume),
            existing="redo" if force else "refuse",
            check_mix=not allow_mixed,
        )
        _merge_alone(source, output, options, json_mode=json_mode, dry_run=dry_run)
        return
    from glm5deploy.stages.merge import MergeStage

    flags = {
        "merge.mode": "never" if no_merge else mode,
        "merge.output": output,
        "merge.consume": consume,
        "merge.verify": verify,
        "merge.chunk_bytes": chunk_bytes,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    session.execute("merge", "merge", MergeStage(io=io, redo=force), force=force, dry_run=dry_run)


def _merge_alone(source: Path, output: Path | None, options: MergeOptions, *, json_mode: bool, dry_run: bool) -> None:
    from glm5deploy.gguf_files.copy import merge as merge_files
    from glm5deploy.gguf_files.merge_plan import plan_merge
    from glm5deploy.gguf_files.shards import ShardSet

    if output is None:
        raise UsageError("--from needs --output", hint=f"glm5deploy merge --from {source} --output MODEL.gguf")
    out = current_output(json_mode=json_mode)
    if dry_run:
        plan = plan_merge(ShardSet.open(source, check_mix=options.check_mix))
        out.result(
            {
                "would": f"merge {len(plan.sources)} shards",
                "output": str(output),
                "bytes": plan.size,
                "tensors": len(plan.tensors),
                "plan": plan.digest,
            }
        )
        return
    result = merge_files(source, output, options, progress=out.progress)
    value: dict[str, object] = {
        "output": str(result.output),
        "bytes": result.nbytes,
        "io": result.mode,
        "copied_bytes": result.copied,
        "shared_bytes": result.cloned,
        "resumed_at": result.resumed_at,
        "verified_tensors": len(result.sha256),
    }
    if json_mode and result.sha256:
        value["sha256"] = result.sha256
    done = "is merged already" if result.mode == "none" else human_bytes(result.nbytes)
    verified = f", {len(result.sha256)} tensors verified" if result.sha256 else ""
    out.result(value, f"{result.output}: {done}{verified}")
