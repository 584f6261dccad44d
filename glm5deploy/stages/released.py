"""Shards that ``merge --consume`` has released.

Fetch must not bring them back while the merged file, finished or not, stands for them. The record lies beside the
merged files, not with the records of stages: those may be deleted at any time, and only cost a look at the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.files import read_json, write_json

MERGED = "merged"
_NAME = "released.json"


@dataclass(frozen=True, slots=True)
class Release:
    """``shards`` have the sha256 that fetch had proved ("" where the hub lists none); ``output`` is what has them."""

    shards: Mapping[Path, str]
    output: Path


def announce_release(workdir: Path, release: Release) -> None:
    """Write down, before the first byte goes, which shards are about to be merged and released."""
    shards = {str(path): sha256 for path, sha256 in release.shards.items()}
    write_json(workdir / MERGED / _NAME, {"shards": shards, "output": str(release.output)})


def release_of(workdir: Path) -> Release | None:
    """The announced release, while the file it goes into, or the unfinished one, exists; else None."""
    from glm5deploy.gguf_files.merge_job import journal_path

    try:
        record = read_json(workdir / MERGED / _NAME)
    except (OSError, ValueError):
        return None
    shards = record.get("shards") if record is not None else None
    if record is None or not isinstance(shards, dict):
        return None
    output = Path(str(record.get("output")))
    if not output.exists() and not journal_path(output).exists():
        return None
    return Release({Path(path): str(sha256) for path, sha256 in shards.items()}, output)


def is_released_in(workdir: Path, shard: Path, sha256: str) -> bool:
    """Whether ``shard`` may be absent: it was released into a merged file that is there, finished or not.

    Only if ``sha256`` was its content: a newer commit's shard of the same name was not released.
    """
    release = release_of(workdir)
    return release is not None and release.shards.get(shard) == sha256 and not shard.exists()
