"""``install``: the sparse backend, proved on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, DryRunOpt, ForceOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session


def install(
    attention: Annotated[
        Literal["triton", "native"] | None,
        typer.Option(help="Our Triton sparse backend, or whatever vLLM itself would choose."),
    ] = None,
    tune: Annotated[
        bool | None, typer.Option("--tune", help="Measure launch parameters on this GPU instead of the table's.")
    ] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
    force: ForceOpt = False,
    dry_run: DryRunOpt = False,
) -> None:
    """Prove that vLLM resolves our loader and sparse backend here and that the backend computes right."""
    flags = {"install.attention": attention, "install.tune": tune}
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    session.execute("install", "install", force=force, dry_run=dry_run)
