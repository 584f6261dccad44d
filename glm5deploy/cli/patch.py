"""``patch``: the model folder, rebuilt from the GGUF alone, and a vLLM that can load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, DryRunOpt, ForceOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session


def patch(
    gguf: Annotated[
        Path | None,
        typer.Option(
            "--gguf", metavar="PATH", help="A GGUF file, a shard or a folder with one set, instead of merge's."
        ),
    ] = None,
    indexer_schedule: Annotated[
        str | None,
        typer.Option(
            "--indexer-schedule",
            metavar="FSFS…",
            help="One letter a layer, F for an own indexer, S for a shared one; only where the file does not say.",
        ),
    ] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Rebuild config, tokenizer and chat template from the GGUF and prove that vLLM resolves our loader."""
    from glm5deploy.stages.patch import PatchStage

    flags = {"patch.indexer_schedule": indexer_schedule}
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    session.execute("patch", "patch", PatchStage(gguf), force=force, dry_run=dry_run)
