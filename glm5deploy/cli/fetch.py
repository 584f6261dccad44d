"""``fetch`` and ``verify``: shards that arrive whole, and the proof that they still are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from glm5deploy.cli.options import (
    DEFAULT_WORKDIR,
    ConfigOpt,
    DryRunOpt,
    ForceOpt,
    JsonOpt,
    ModelArg,
    WorkdirOpt,
    model_flags,
)
from glm5deploy.cli.session import Session


def fetch(
    model: ModelArg = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. Default: main.")] = None,
    parallel: Annotated[int | None, typer.Option(min=1, max=64, help="Shards at once.")] = None,
    transport: Annotated[
        Literal["auto", "xet", "https"] | None,
        typer.Option(help="auto takes xet where the hub offers it and falls back to plain HTTPS."),
    ] = None,
    adopt: Annotated[
        Path | None,
        typer.Option(
            "--from",
            exists=True,
            file_okay=False,
            help="Take over shards with the right hash from this folder (a hub cache works).",
        ),
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Follow the branch if it has moved.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Hash all shards, and fetch the damaged ones anew.")] = False,
    local_files_only: Annotated[
        bool | None, typer.Option("--local-files-only", help="Ask no hub; fail if something is missing.")
    ] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Download one quantisation's shards: pinned to a commit, resumed to the byte, proved by hash."""
    from glm5deploy.stages.fetch import FetchStage

    flags = {
        **model_flags(model),
        "model.revision": revision,
        "fetch.parallel": parallel,
        "fetch.transport": transport,
        "fetch.adopt": adopt,
        "fetch.local_files_only": local_files_only,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    stage = FetchStage(refresh=refresh, repair=repair)
    session.execute("fetch", "fetch", stage, force=force or refresh or repair, dry_run=dry_run)


def verify(
    model: ModelArg = None,
    parallel: Annotated[int | None, typer.Option(min=1, help="Shards at once. Default: one a core.")] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Hash every fetched shard again and name the damaged ones. Exit code 1 when there are any."""
    from glm5deploy.stages.fetch import verify_fetched

    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=model_flags(model))
    found = verify_fetched(session.config, session.workdir, parallel=parallel, progress=session.output.progress)
    damaged = [row for row in found.rows if row["verdict"] not in ("sound", "released")]
    session.output.result({"shards": found.rows, "damaged": len(damaged), "recorded": not found.unrecorded})
    if found.unrecorded:
        session.output.warning(f"{found.unrecorded}; what was found is not recorded: verify again where it can be")
    if damaged:
        session.output.note("hint: glm5deploy fetch --repair brings the damaged shards again")
        raise typer.Exit(1)
