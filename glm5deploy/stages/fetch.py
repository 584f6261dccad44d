"""fetch: the shards of one quantisation, pinned to a commit, each proved by the hub's hash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.config import Config, ModelConfig
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.files import changed_file, file_facts
from glm5deploy.pipeline.stage import Context, Json
from glm5deploy.progress import ProgressSink

if TYPE_CHECKING:
    from glm5deploy.hub.choice import RemoteFile
    from glm5deploy.hub.client import Hub
    from glm5deploy.hub.plan import FetchPlan, Planned


@dataclass(frozen=True, slots=True)
class FetchStage:
    """``refresh`` follows a branch that has moved; ``repair`` hashes everything on disk before fetching what is wrong.

    Outputs: ``files`` (path, size, mtime_ns, sha256 of each, in order), ``repo``, ``commit``,
    ``quant``, ``bytes``.
    """

    refresh: bool = False
    repair: bool = False
    name: str = "fetch"

    def inputs(self, context: Context) -> Json:
        model = wanted_model(context.config, context.workdir) or context.config.model
        return {"repo": model.repo, "quant": model.quant, "revision": model.revision}

    def stale_outputs(self, context: Context, outputs: Json) -> list[str]:
        from glm5deploy.hub.verify import is_verified
        from glm5deploy.stages.released import is_released

        plan, folder = recorded_plan(context.config, context.workdir), destination(context.config, context.workdir)
        if plan is None or plan.commit != outputs.get("commit"):
            return ["the plan is gone or has changed"]
        reasons = []
        for file, path in zip(plan.files, plan.paths(folder), strict=True):
            if is_released(context, path):
                continue  # merge --consume has taken it over
            reason = changed_file({"path": str(path), "size": file.size, "mtime_ns": _mtime(path)})
            if reason is None and not is_verified(folder, file):
                reason = f"{path} was modified or found damaged"
            reasons += [reason] if reason else []
        return reasons

    def plan(self, context: Context) -> Json:
        from glm5deploy.hub.disk import free_bytes
        from glm5deploy.hub.verify import shard_states

        folder = destination(context.config, context.workdir)
        planned = self._planned(context)
        states = shard_states(planned.plan, folder)
        return {
            "repository": f"{planned.plan.repo}@{planned.plan.commit}",
            "quantisation": planned.plan.label,
            "destination": str(folder),
            "total_bytes": planned.plan.size,
            "missing_bytes": planned.plan.size - sum(state.present for state in states),
            "merge_bytes": _bytes_for_merge(context, planned.plan),
            "free_bytes": free_bytes(folder),
            "notices": list(planned.notices),
            "shards": [{"shard": s.file.path, "size": s.file.size, "state": s.state} for s in states],
        }

    def run(self, context: Context) -> Json:
        from glm5deploy.hub.download import Download
        from glm5deploy.hub.faults import Policy
        from glm5deploy.hub.plan import write_plan
        from glm5deploy.hub.verify import verify

        settings, events = context.config.fetch, context.events
        folder = destination(context.config, context.workdir)
        planned = self._planned(context)
        for notice in planned.notices:
            events.warning(notice)
        plan = planned.plan
        write_plan(plan, folder)
        events.checkpoint(f"{plan.repo}@{plan.commit[:12]} {plan.label}: {len(plan.files)} shards", commit=plan.commit)
        if self.repair:
            for verdict in verify(plan, folder, progress=events.progress):
                if verdict.problem:
                    events.warning(verdict.detail)

        def proved(file: RemoteFile) -> None:
            events.checkpoint(f"{file.name} verified", shard=file.path)

        policy = Policy(
            parallel=settings.parallel,
            transport=settings.transport,
            stall_rate=settings.stall_rate,
            stall_seconds=settings.stall_seconds,
            retries=settings.retries,
        )
        paths = Download(
            _hub(context.config),
            plan,
            folder,
            policy,
            adopt=settings.adopt,
            later_bytes=_bytes_for_merge(context, plan),
            progress=events.progress,
            note=events.note,
            proved=proved,
        ).run()
        hashes = [file.sha256 or "" for file in plan.files]
        return {
            "repo": plan.repo,
            "commit": plan.commit,
            "quant": plan.label,
            "bytes": plan.size,
            "files": [{**file_facts(path), "sha256": sha} for path, sha in zip(paths, hashes, strict=True)],
            "summary": f"{plan.repo}@{plan.commit[:12]} {plan.label}: {len(paths)} shards, all hashes match",
        }

    def _planned(self, context: Context) -> Planned:
        from glm5deploy.hub.plan import make_plan

        model = _model(context.config, context.workdir)
        folder = destination(context.config, context.workdir)
        hub = _hub(context.config)
        return make_plan(hub, model.repo, model.quant, folder, revision=model.revision, refresh=self.refresh)


def verify_fetched(config: Config, workdir: Path, *, parallel: int | None, progress: ProgressSink) -> list[Json]:
    """Hash every fetched shard; one row a shard with its problem ("" when it is sound).

    :raises DeployError: nothing was fetched into this work folder.
    """
    from glm5deploy.hub.verify import verify

    folder, plan = destination(config, workdir), recorded_plan(config, workdir)
    if plan is None:
        raise DeployError(f"no plan is recorded in {folder}", hint="glm5deploy fetch REPO:QUANT")
    verdicts = verify(plan, folder, parallel=parallel, progress=progress)
    return [
        {"shard": v.file.path, "size": v.file.size, "verdict": v.problem or "sound", "detail": v.detail}
        for v in verdicts
    ]


def wanted_model(config: Config, workdir: Path) -> ModelConfig | None:
    """The configured model; where none is named, the only one that was fetched into this work folder before.

    :raises UsageError: a name that is not ``owner/name``.
    """
    from glm5deploy.hub.plan import recorded_plans

    model = config.model
    if not model.repo:
        plans = [plan for folder in sorted(workdir.glob("shards/*")) for plan in recorded_plans(folder)]
        return ModelConfig(plans[0].repo, plans[0].quant, plans[0].revision) if len(plans) == 1 else None
    if model.repo.count("/") != 1 or model.repo.startswith((".", "/")) or "\\" in model.repo:
        raise UsageError(f"{model.repo!r} is not a repository's name", hint="it has the form owner/name")
    return model


def destination(config: Config, workdir: Path) -> Path:
    """The folder of a repository's shards: below it they have the names they have in the repository."""
    return workdir / "shards" / _model(config, workdir).repo.replace("/", "--")


def recorded_plan(config: Config, workdir: Path) -> FetchPlan | None:
    from glm5deploy.hub.plan import plan_path, read_plan

    model = _model(config, workdir)
    return read_plan(plan_path(destination(config, workdir), model.repo, model.quant))


def _model(config: Config, workdir: Path) -> ModelConfig:
    model = wanted_model(config, workdir)
    if model is None:
        raise UsageError("no model was named", hint="glm5deploy fetch OWNER/NAME:QUANT, or model.repo in the TOML file")
    return model


def _hub(config: Config) -> Hub:
    from glm5deploy.hub.client import Hub

    return Hub(offline=config.fetch.local_files_only)


def _bytes_for_merge(context: Context, plan: FetchPlan) -> int:
    """Room that the merge will need on the file system of the shards."""
    from glm5deploy.hub.disk import same_file_system

    merge = context.config.merge
    if merge.mode != "always" or len(plan.files) == 1:
        return 0
    output = merge.output or context.workdir
    if not same_file_system(output, destination(context.config, context.workdir)):
        return 0
    return max(file.size for file in plan.files) if merge.consume else plan.size


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
