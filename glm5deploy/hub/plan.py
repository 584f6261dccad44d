"""What to download, decided once: a commit and its shards with sizes and hashes, written down before the first byte."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from glm5deploy.errors import HubError
from glm5deploy.hub.choice import RemoteFile, checked_file, choose_set, group_sets
from glm5deploy.hub.client import Hub
from glm5deploy.hub.records import STATE_FOLDER, read_record, state_folder, write_record

_VERSION = 1
_HEX40 = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """The shards of one quantisation at one commit, in shard order."""

    repo: str
    revision: str
    commit: str
    quant: str
    label: str
    files: tuple[RemoteFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def paths(self, destination: Path) -> tuple[Path, ...]:
        """Where the shards lie below the download folder: under the names they have in the repository."""
        return tuple(destination / file.path for file in self.files)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what was noticed in making it, each a sentence for the user."""

    plan: FetchPlan
    notices: tuple[str, ...] = ()


def plan_path(destination: Path, repo: str, quant: str) -> Path:
    """Where the plan for a repository's quantisation is written down."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{repo}--{quant or 'only'}")[:180]
    return destination / STATE_FOLDER / "plans" / f"{name}.json"


def make_plan(
    hub: Hub, repo: str, quant: str, destination: Path, *, revision: str = "main", refresh: bool = False
) -> Planned:
    """The plan recorded for this request, or a new one from the hub. Writes nothing: see :func:`write_plan`.

    A recorded plan keeps its commit even when the branch has moved; that is noticed, and ``refresh`` lists anew.
    Offline the recorded plan is all there is.

    :raises HubError: unreachable, refused, incomplete, or nothing recorded while offline.
    :raises UsageError: the quantisation is unknown or ambiguous.
    """
    recorded = read_plan(plan_path(destination, repo, quant))
    if recorded is not None and (recorded.repo, recorded.quant) != (repo, quant):
        recorded = None
    if hub.offline:
        if recorded is None:
            raise HubError(
                f"working offline, and no plan for {repo} {quant} is recorded in {destination}",
                hint="run once with access to the hub, or give a folder that was fetched into before",
            )
        return Planned(recorded)
    if recorded is not None and recorded.revision == revision and not refresh:
        if revision == recorded.commit:
            return Planned(recorded)
        try:
            now = hub.commit_of(repo, revision)
        except HubError as error:
            return Planned(recorded, (f"could not look for a newer {revision}: {error.message}",))
        if now == recorded.commit:
            return Planned(recorded)
        notice = (
            f"{revision} of {repo} has moved to {now[:12]}; staying at {recorded.commit[:12]} (--refresh follows it)"
        )
        return Planned(recorded, (notice,))
    commit = hub.commit_of(repo, revision)
    chosen = choose_set(group_sets(hub.files_of(repo, commit)), quant, repo)
    plan = FetchPlan(repo, revision, commit, quant, chosen.label, chosen.files)
    if recorded is not None and recorded.commit != commit:
        return Planned(plan, (f"plan changed from commit {recorded.commit[:12]} to {commit[:12]}",))
    return Planned(plan)


def write_plan(plan: FetchPlan, destination: Path) -> Path:
    """Write the plan down durably; returns where."""
    state_folder(destination)
    path = plan_path(destination, plan.repo, plan.quant)
    write_record(path, {"version": _VERSION, **asdict(plan)})
    return path


def recorded_plans(destination: Path) -> list[FetchPlan]:
    """All plans written down in a download folder that can be trusted."""
    found = (read_plan(path) for path in sorted((destination / STATE_FOLDER / "plans").glob("*.json")))
    return [plan for plan in found if plan is not None]


def read_plan(path: Path) -> FetchPlan | None:
    """A recorded plan, checked as strictly as a listing; None when there is none that can be trusted."""
    record = read_record(path)
    if record.get("version") != _VERSION:
        return None
    texts = [record.get(key) for key in ("repo", "revision", "commit", "quant", "label")]
    entries = record.get("files")
    if not all(isinstance(text, str) for text in texts) or not _HEX40.fullmatch(str(record["commit"])):
        return None
    if not isinstance(entries, list) or not entries:
        return None
    try:
        files = tuple(_recorded_file(entry) for entry in entries)
    except (HubError, TypeError, KeyError):
        return None
    repo, revision, commit, quant, label = (str(text) for text in texts)
    return FetchPlan(repo, revision, commit, quant, label, files)


def _recorded_file(entry: dict[str, object]) -> RemoteFile:
    size, sha256, xet = entry["size"], entry["sha256"], entry["xet_hash"]
    return checked_file(entry["path"], size, entry["git_oid"], sha256, xet)
