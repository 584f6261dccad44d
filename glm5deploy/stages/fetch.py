"""fetch: the shards of one quantisation, pinned to a commit, each proved by the hub's hash."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.config import Config, ModelConfig
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.files import changed_file, file_facts, free_bytes
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
        from glm5deploy.stages.fetch_release import released_shards

        plan, folder = recorded_plan(context.config, context.workdir), destination(context.config, context.workdir)
        if plan is None or plan.commit != outputs.get("commit"):
            return ["the plan is gone or has changed"]
        recorded = outputs["files"]
        named = [facts.get("path") for facts in recorded] if isinstance(recorded, list) else []
        if named != [str(path) for path in plan.paths(folder)]:
            return ["the work folder was moved or copied"]
        reasons, released = [], released_shards(context.workdir, folder, plan)
        for file, path in zip(plan.files, plan.paths(folder), strict=True):
            if file.path in released:
                continue  # merge --consume has taken it over
            reason = changed_file({"path": str(path), "size": file.size, "mtime_ns": _mtime(path)})
            if reason is None and not is_verified(folder, file):
                reason = f"{path} was modified or found damaged"
            reasons += [reason] if reason else []
        return reasons

    def plan(self, context: Context) -> Json:
        from glm5deploy.hub.verify import shard_states
        from glm5deploy.stages.fetch_release import bytes_for_merge

        folder = destination(context.config, context.workdir)
        planned, released = self._planned(context)
        wanted = _without(planned.plan, released)
        states = {state.file.path: state for state in shard_states(wanted, folder)}
        return {
            "repository": f"{planned.plan.repo}@{planned.plan.commit}",
            "quantisation": planned.plan.label,
            "destination": str(folder),
            "total_bytes": planned.plan.size,
            "missing_bytes": wanted.size - sum(state.present for state in states.values()),
            "merge_bytes": bytes_for_merge(context, folder, planned.plan, released),
            "free_bytes": free_bytes(folder),
            "notices": list(planned.notices),
            "shards": [
                {"shard": f.path, "size": f.size, "state": states[f.path].state if f.path in states else "released"}
                for f in planned.plan.files
            ],
        }

    def run(self, context: Context) -> Json:
        from glm5deploy.hub.download import Download, folder_lock
        from glm5deploy.hub.faults import Policy
        from glm5deploy.hub.plan import write_plan
        from glm5deploy.hub.verify import verify
        from glm5deploy.stages.fetch_release import bytes_for_merge

        settings, events = context.config.fetch, context.events
        folder = destination(context.config, context.workdir)
        planned, released = self._planned(context)
        for notice in planned.notices:
            events.warning(notice)
        plan = planned.plan
        wanted = _without(plan, released)
        write_plan(plan, folder)
        events.checkpoint(f"{plan.repo}@{plan.commit[:12]} {plan.label}: {len(plan.files)} shards", commit=plan.commit)
        if self.repair:
            with folder_lock(folder):
                verdicts = verify(wanted, folder, progress=events.progress)
            for verdict in verdicts:
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
        download = Download(
            _hub(context.config),
            wanted,
            folder,
            policy,
            adopt=settings.adopt,
            later_bytes=bytes_for_merge(context, folder, plan, released),
            part=bool(released),
            progress=events.progress,
            note=events.note,
            proved=proved,
        )
        if wanted.files:
            download.run()
        gone = f", {len(released)} of them merged and released" if released else ""
        return {
            "repo": plan.repo,
            "commit": plan.commit,
            "quant": plan.label,
            "bytes": plan.size,
            "files": [{**_facts(folder, file, released), "sha256": file.sha256 or ""} for file in plan.files],
            "summary": f"{plan.repo}@{plan.commit[:12]} {plan.label}: {len(plan.files)} shards, all hashes match{gone}",
        }

    def _planned(self, context: Context) -> tuple[Planned, frozenset[str]]:
        """The plan, and which of its shards are released; refuses another commit while some of them are half so."""
        from glm5deploy.hub.plan import make_plan
        from glm5deploy.stages.fetch_release import refuse_while_releasing, released_shards

        model = _model(context.config, context.workdir)
        folder = destination(context.config, context.workdir)
        if self.refresh:
            refuse_while_releasing(context.workdir, folder)
        hub, recorded = _hub(context.config), recorded_plan(context.config, context.workdir)
        planned = make_plan(hub, model.repo, model.quant, folder, revision=model.revision, refresh=self.refresh)
        if recorded is not None and recorded.commit != planned.plan.commit:
            refuse_while_releasing(context.workdir, folder)
        return planned, released_shards(context.workdir, folder, planned.plan)


_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(frozen=True, slots=True)
class Verified:
    """One row a shard with its verdict: sound, released, or what is wrong. ``unrecorded`` is why the verdicts could
    not be written down for later commands; empty when they were."""

    rows: list[Json]
    unrecorded: str = ""


def verify_fetched(config: Config, workdir: Path, *, parallel: int | None, progress: ProgressSink) -> Verified:
    """Hash every fetched shard, also where nothing may be written.

    :raises DeployError: nothing was fetched into this work folder, or another process is fetching into it.
    """
    from glm5deploy.hub.download import folder_lock
    from glm5deploy.hub.verify import verify
    from glm5deploy.stages.fetch_release import released_shards

    folder, plan = destination(config, workdir), recorded_plan(config, workdir)
    if plan is None:
        raise DeployError(f"no plan is recorded in {folder}", hint="glm5deploy fetch REPO:QUANT")
    unrecorded = ""
    with ExitStack() as stack:
        try:
            stack.enter_context(folder_lock(folder))
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise
            unrecorded = f"{error.filename or folder} cannot be written: {error.strerror}"
        released = released_shards(workdir, folder, plan)
        wanted = _without(plan, released)
        verdicts = verify(wanted, folder, parallel=parallel, progress=progress, record=not unrecorded)
    said = {v.file.path: (v.problem or "sound", v.detail) for v in verdicts}
    merged = ("released", "merged, and released as a file")
    rows = [(file, *said.get(file.path, merged)) for file in plan.files]
    shown: list[Json] = [{"shard": f.path, "size": f.size, "verdict": v, "detail": detail} for f, v, detail in rows]
    return Verified(shown, unrecorded)


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


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _without(plan: FetchPlan, released: frozenset[str]) -> FetchPlan:
    return replace(plan, files=tuple(file for file in plan.files if file.path not in released))


def _facts(folder: Path, file: RemoteFile, released: frozenset[str]) -> Json:
    """Of a released shard, what was recorded when it was proved."""
    from glm5deploy.hub.verify import proved_mtime

    if file.path not in released:
        return file_facts(folder / file.path)
    return {"path": str(folder / file.path), "size": file.size, "mtime_ns": proved_mtime(folder, file)}
