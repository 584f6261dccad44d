"""``doctor``: one screen about this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.session import Session

_MARKS = {"ok": "OK  ", "warn": "WARN", "fail": "FAIL"}


def doctor(
    nccl: Annotated[bool, typer.Option("--nccl", help="Also let the ranks all-reduce (20 s and more).")] = False,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="GPUs meant to be used. Default: all.")] = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Check driver, GPUs, engine, disk, limits and hub. Exit code 1 when something must be mended."""
    from glm5deploy.checks import worst
    from glm5deploy.stages.doctor import examine

    session = Session.open(workdir=workdir, config=config, json_mode=json_mode)
    checks = list(examine(session.workdir, collectives=nccl, ranks=tp))
    level = worst(checks)
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{_MARKS[check.level]}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"      {'':<{width}}  → {check.remedy}")
    value = [{"check": c.name, "level": c.level, "found": c.found, "remedy": c.remedy} for c in checks]
    session.output.result({"level": level, "checks": value}, "\n".join(lines))
    if level == "fail":
        raise typer.Exit(1)
