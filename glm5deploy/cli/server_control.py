"""``stop`` and ``logs``: the server that a work folder has running. They read no settings: bad ones are no obstacle."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import current_output


def stop(
    patience: Annotated[float, typer.Option("--patience", min=0, help="Seconds before it is killed.")] = 60.0,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    json_mode: JsonOpt = False,
) -> None:
    """Stop the server and all of its processes. Nothing to stop is no error."""
    from glm5deploy.server.state import state_path
    from glm5deploy.server.stop import stop_server

    output, workdir = current_output(json_mode=json_mode), workdir.expanduser().absolute()
    stopped = stop_server(state_path(workdir), patience)
    output.result(
        {"stopped": stopped is not None, "url": stopped.url if stopped else None},
        f"{stopped.name} at {stopped.url} has stopped" if stopped else f"no server runs from {workdir}",
    )


def logs(
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 50,
    following: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    json_mode: JsonOpt = False,
) -> None:
    """Show the end of the server's log."""
    from glm5deploy.errors import UsageError
    from glm5deploy.server.follow import follow, last_lines
    from glm5deploy.server.running import Places

    if following and json_mode:
        raise UsageError("--json prints one object, --follow never ends")
    output = current_output(json_mode=json_mode)
    log = Places.of(workdir.expanduser().absolute()).log
    found, position = last_lines(log, lines)
    if not following:
        output.result({"log": str(log), "lines": [line.rstrip("\r\n") for line in found]}, "".join(found).rstrip("\n"))
        return
    output.piece("".join(found))
    try:
        for added in follow(log, position):
            output.piece(added)
    except KeyboardInterrupt:
        return
