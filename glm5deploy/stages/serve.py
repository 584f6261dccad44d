"""serve: preflight, start, prove that it answers, hold, stop."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from glm5deploy.checks import require_no_failure
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.server.session import RunningServer
from glm5deploy.stages.gpu_preflight import check_collectives
from glm5deploy.stages.serve_plan import ServePlan, make_plan

ServerInfo = RunningServer
"""What ``on_ready`` gets: ``base_url``, ``model``, ``client()``, ``report``, ``wait()``."""


class ServeStage:
    """Never up to date: a server is started each time.

    ``on_ready`` is called with the server once it has answered; the server is stopped when it returns. By default it
    waits for Ctrl-C.
    """

    name = "serve"

    def __init__(self, on_ready: Callable[[ServerInfo], None] | None = None) -> None:
        self._on_ready = on_ready

    def inputs(self, context: Context) -> Json:
        return {"model_folder": str(model_folder(context)), "backend": context.require("install").get("backend")}

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        return ["a server is started each time"]

    def plan(self, context: Context) -> Json:
        plan = _plan(context)
        return {
            "command": plan.command.shell(),
            "api_key": plan.key.source if plan.key else "none",
            "log": str(plan.places.log),
            "reasons": dict(plan.command.reasons),
            "checks": [
                {"check": c.name, "level": c.level, "found": c.found, "remedy": c.remedy}
                for c in plan.all_checks(remember=False)
            ],
        }

    def run(self, context: Context) -> Json:
        from glm5deploy.server.endpoint import curl_example
        from glm5deploy.server.leftover import wait_for_leftover
        from glm5deploy.server.session import serving

        plan = _plan(context)
        wait_for_leftover(plan.places.state, plan.settings.stop_grace)
        checks = plan.all_checks(remember=True)
        for check in checks:
            if check.level == "warn":
                context.events.warning(f"{check.name}: {check.found} ({check.remedy})")
        require_no_failure(checks)
        if plan.machine is not None and plan.ranks > 1:
            context.events.note(f"letting {plan.ranks} GPUs sum before anything is loaded")
            check = check_collectives(plan.ranks)
            require_no_failure([check])
            context.events.note(check.found)
        context.events.note(f"starting vLLM; its log is {plan.places.log}")
        with serving(plan.command, plan.settings, plan.model, plan.places, plan.key, context.events.progress) as server:
            curl = curl_example(plan.settings, plan.key)
            context.events.checkpoint(
                f"READY at {server.base_url}/v1 as {server.model}: {server.report.summary}",
                url=f"{server.base_url}/v1",
                model=server.model,
                curl=curl,
            )
            context.events.note(curl)
            (self._on_ready or RunningServer.wait)(server)
        context.events.note("the server has stopped")
        return {
            "url": f"{plan.settings.base_url}/v1",
            "model": plan.settings.name,
            "tp": plan.settings.tp,
            "report": server.report.as_json(),
            "summary": server.report.summary,
        }


def model_folder(context: Context) -> Path:
    return Path(str(context.require("patch")["folder"]))


def _plan(context: Context) -> ServePlan:
    install = context.require("install")
    return make_plan(context.workdir, model_folder(context), context.config, install, os.environ)
