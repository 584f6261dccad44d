"""``status`` and ``reset``: what the records say."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session, status_words

EXIT_STALE = 3


def status(workdir: WorkdirOpt = DEFAULT_WORKDIR, config: ConfigOpt = None, json_mode: JsonOpt = False) -> None:
    """Show which stages hold and why the others do not, and the server that runs, if one does.

    Exit code 3 when a stage is stale (serve never counts).
    """
    from glm5deploy.pipeline.status import UpToDate
    from glm5deploy.server.state import read_state, state_path

    session = Session.open(workdir=workdir, config=config, json_mode=json_mode)
    statuses = session.pipeline().statuses()
    server = read_state(state_path(session.workdir))
    running = {"name": server.name, "url": server.url, "phase": server.phase} if server and server.alive else None
    session.output.result(
        {
            "workdir": str(session.workdir),
            "stages": [{"stage": n, **status_words(s)} for n, s in statuses.items()],
            "server": running,
        }
    )
    if any(not isinstance(s, UpToDate) for name, s in statuses.items() if name != "serve"):
        raise typer.Exit(EXIT_STALE)


def reset(
    stage: Annotated[str, typer.Argument(help="fetch, merge, patch, install or serve.")],
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Forget that a stage succeeded, so that it runs again. Files it made are kept."""
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode)
    known = session.pipeline().reset(stage)
    session.output.result(
        {"stage": stage, "was_recorded": known},
        f"{stage} will run again" if known else f"{stage} had no record in {session.workdir}",
    )
