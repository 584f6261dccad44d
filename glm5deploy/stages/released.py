"""Shards that ``merge --consume`` has released.

Fetch must not bring them back while the merged file, finished or not, stands for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from glm5deploy.files import read_json, write_json
from glm5deploy.pipeline.stage import Context

_NAME = "merge-released.json"


def announce_release(context: Context, shards: Iterable[Path], output: Path) -> None:
    """Write down, before the first byte goes, which shards are about to be merged into ``output`` and released."""
    write_json(context.private / _NAME, {"shards": [str(path) for path in shards], "output": str(output)})


def released_into(context: Context) -> tuple[frozenset[Path], Path] | None:
    """The announced shards and the file they go into, while that file, or the unfinished one, exists; else None."""
    from glm5deploy.gguf_files.merge_job import journal_path

    try:
        record = read_json(context.private / _NAME)
    except (OSError, ValueError):
        return None
    if record is None or not isinstance(record.get("shards"), list):
        return None
    output = Path(str(record.get("output")))
    if not output.exists() and not journal_path(output).exists():
        return None
    shards = record["shards"]
    assert isinstance(shards, list)
    return frozenset(Path(str(path)) for path in shards), output


def is_released(context: Context, shard: Path) -> bool:
    """Whether ``shard`` may be absent: it was released into a merged file that is there, finished or not."""
    found = released_into(context)
    return found is not None and shard in found[0] and not shard.exists()
