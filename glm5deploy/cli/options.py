"""Options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOpt = Annotated[
    Path | None,
    typer.Option("--config", help="TOML file with settings. Default: glm5deploy.toml in the work folder, if there."),
]
WorkdirOpt = Annotated[
    Path,
    typer.Option("--workdir", envvar="GLM5DEPLOY_WORKDIR", help="Folder for shards, models, logs and state."),
]
JsonOpt = Annotated[bool, typer.Option("--json", help="One JSON object on stdout; events as JSON lines on stderr.")]
ForceOpt = Annotated[bool, typer.Option("--force", help="Run again even when up to date.")]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]
ModelArg = Annotated[
    str | None,
    typer.Argument(metavar="REPO[:QUANT]", help="For example unsloth/GLM-5.2-GGUF:UD-Q4_K_XL."),
]

DEFAULT_WORKDIR = Path("glm5deploy-work")


def model_flags(model: str | None) -> dict[str, object]:
    """``REPO[:QUANT]`` as settings; a missing part is left to the configuration."""
    if not model:
        return {}
    repo, _, quant = model.partition(":")
    return {"model.repo": repo or None, "model.quant": quant or None}
