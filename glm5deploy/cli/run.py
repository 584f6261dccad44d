"""``run``: all stages, or a range of them."""

from __future__ import annotations

from typing import Annotated

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


def run(
    model: ModelArg = None,
    first: Annotated[str | None, typer.Option("--from", metavar="STAGE", help="First stage to run.")] = None,
    last: Annotated[str | None, typer.Option("--until", metavar="STAGE", help="Last stage to run.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the repository.")] = None,
    no_merge: Annotated[bool, typer.Option("--no-merge", help="Serve the shards as they are.")] = False,
    indexer_schedule: Annotated[
        str | None,
        typer.Option(metavar="FSFS…", help="One letter a layer, F or S; only where the file does not say."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="GPUs that share every layer (tensor parallel).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Run every stage that is not up to date: fetch → merge → patch → install → serve."""
    flags = {
        **model_flags(model),
        "model.revision": revision,
        "merge.mode": "never" if no_merge else None,
        "patch.indexer_schedule": indexer_schedule,
        "serve.tp": tp,
        "serve.port": port,
    }
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    session.execute(first, last, force=force, dry_run=dry_run)
