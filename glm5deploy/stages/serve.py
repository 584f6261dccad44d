"""serve: preflight, start, prove that it answers, hold, stop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.checks import Check, require_no_failure
from glm5deploy.files import changed_file
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.server.running import RunningServer
from glm5deploy.stages.cluster import ClusterStart, cluster_checks, plan_cluster
from glm5deploy.stages.gpu_preflight import check_collectives, gpu_state
from glm5deploy.stages.serve_plan import ServePlan, make_plan

if TYPE_CHECKING:
    from glm5deploy.server.watchdog import Restarts

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
        cluster = plan_cluster(plan, context.config)
        return {
            "command": cluster.head.shell() if cluster else plan.command.shell(),
            **({"machines": cluster.words()} if cluster else {}),
            "api_key": plan.key.source if plan.key else "none",
            "log": str(plan.places.log),
            "reasons": dict(plan.command.reasons),
            "checks": [
                {"check": c.name, "level": c.level, "found": c.found, "remedy": c.remedy}
                for c in (*plan.all_checks(remember=False), *(cluster_checks(cluster, plan) if cluster else ()))
            ],
        }

    def run(self, context: Context) -> Json:
        """Serve until ``on_ready`` returns; a server that was ready and hung or died is started again."""
        from glm5deploy.server.process import ServerExited
        from glm5deploy.server.readiness import NotReady
        from glm5deploy.server.watchdog import Restarts, Stalled

        plan = _plan(context)
        cluster = plan_cluster(plan, context.config)
        _preflight(context, plan, cluster)
        restarts = Restarts(context.config.serve.restarts)
        while True:
            try:
                return self._serve(context, plan, cluster, restarts)
            except (ServerExited, Stalled, NotReady) as failure:
                wait = restarts.next_wait() if restarts.was_ready else None
                if wait is None:
                    raise
                context.events.warning(f"{failure.message}\nstarting again in {wait:.0f} s")
                time.sleep(wait)

    def _serve(self, context: Context, plan: ServePlan, cluster: ClusterStart | None, restarts: Restarts) -> Json:
        from glm5deploy.server.endpoint import curl_example
        from glm5deploy.server.session import serving

        context.events.note(f"starting vLLM; its log is {plan.places.log}")
        for part in cluster.words()[1:] if cluster and cluster.shell is None else ():
            context.events.note(f"start on {part['machine']}: {part['runs']}")
        others = cluster.running(plan.settings.stop_grace) if cluster else nullcontext(_alone)
        with (
            others as beside,
            serving(
                cluster.head if cluster else plan.command,
                plan.settings,
                plan.model,
                plan.places,
                plan.key,
                context.events.progress,
                beside=beside,
                gpu_state=gpu_state,
            ) as server,
        ):
            restarts.ready()
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


def _alone() -> None:
    """Nothing runs on other machines."""


def _preflight(context: Context, plan: ServePlan, cluster: ClusterStart | None) -> None:
    """Raise DeployError for anything that is known to fail; nothing is loaded yet."""
    from glm5deploy.server.leftover import wait_for_leftover

    wait_for_leftover(plan.places.state, plan.settings.stop_grace)
    checks = [
        _check_weights(context),
        *plan.all_checks(remember=True),
        *(cluster_checks(cluster, plan) if cluster else ()),
    ]
    for check in checks:
        if check.level == "warn":
            context.events.warning(f"{check.name}: {check.found} ({check.remedy})")
    require_no_failure(checks)
    if plan.machine is not None and plan.ranks > 1:
        context.events.note(f"letting {plan.ranks} GPUs sum before anything is loaded")
        check = check_collectives(plan.ranks)
        require_no_failure([check])
        context.events.note(check.found)


def _check_weights(context: Context) -> Check:
    """Whether the weights are still those that were proved."""
    served = context.require("patch").get("weights")
    merged = context.outputs.get("merge", {}).get("files")
    files = [facts for facts in merged if isinstance(facts, Mapping)] if isinstance(merged, list) else []
    if served != [facts.get("path") for facts in files]:
        return Check("weights", "ok", "named by hand, not recorded by merge")
    changed = [reason for facts in files if (reason := changed_file(facts))]
    if changed:
        return Check(
            "weights", "fail", "; ".join(changed), f"glm5deploy run --until install --workdir {context.workdir}"
        )
    return Check("weights", "ok", f"{len(files)} files as merge left them")


def model_folder(context: Context) -> Path:
    return Path(str(context.require("patch")["folder"]))


def _plan(context: Context) -> ServePlan:
    install = context.require("install")
    return make_plan(context.workdir, model_folder(context), context.config, install, os.environ)
