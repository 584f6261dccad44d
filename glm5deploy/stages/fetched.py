"""What fetch recorded of the shards, for the stage that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.files import changed_file
from glm5deploy.pipeline.stage import Context


@dataclass(frozen=True, slots=True)
class Fetched:
    """A shard as fetch left it; ``sha256`` is "" where the hub lists none."""

    path: Path
    size: int
    mtime_ns: int
    sha256: str


def fetched_shards(context: Context) -> list[Fetched]:
    """Each shard that fetch recorded, in shard order. Raises Blocked, or FileFormatError for a record without any."""
    files = context.require("fetch").get("files")
    if not isinstance(files, list) or not files:
        raise FileFormatError("the record of fetch names no files", hint="glm5deploy fetch --force")
    return [_shard(facts) for facts in files]


def require_unchanged(context: Context) -> None:
    """Raise :class:`DeployError` if a shard is not as fetch left it, or was found damaged since."""
    from glm5deploy.hub.choice import RemoteFile
    from glm5deploy.hub.verify import is_verified

    folder = context.workdir / "shards" / str(context.require("fetch").get("repo")).replace("/", "--")
    for shard in fetched_shards(context):
        reason = changed_file({"path": shard.path, "size": shard.size, "mtime_ns": shard.mtime_ns})
        if reason is None and shard.sha256 and shard.path.is_relative_to(folder):
            listed = RemoteFile(shard.path.relative_to(folder).as_posix(), shard.size, "", shard.sha256)
            reason = None if is_verified(folder, listed) else f"{shard.path} was found damaged"
        if reason is not None:
            raise DeployError(f"{reason}, so it is not merged", hint="glm5deploy fetch brings what is wrong again")


def _shard(facts: Mapping[str, object]) -> Fetched:
    return Fetched(
        Path(str(facts["path"])), int(str(facts["size"])), int(str(facts["mtime_ns"])), str(facts.get("sha256") or "")
    )
