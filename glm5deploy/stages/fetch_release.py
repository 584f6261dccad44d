"""What ``merge --consume`` means for fetch: shards that need not be files, and room that a merge has taken already."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.errors import UsageError
from glm5deploy.gguf_files.journal import load_journal
from glm5deploy.gguf_files.merge_job import journal_path, partial_path
from glm5deploy.gguf_files.shard_names import parse_shard_name
from glm5deploy.pipeline.stage import Context
from glm5deploy.stages.released import MERGED, is_released_in, release_of

if TYPE_CHECKING:
    from glm5deploy.hub.plan import FetchPlan


def released_shards(workdir: Path, folder: Path, plan: FetchPlan) -> frozenset[str]:
    """Paths in the repository of the shards that a merged file, finished or not, stands for with their very content.

    A finished merge has released all of them. Where some are files again, the set is wanted as files: none is skipped.
    """
    release = release_of(workdir)
    if release is None:
        return frozenset()
    files = [file for file in plan.files if is_released_in(workdir, folder / file.path, file.sha256 or "")]
    if len(files) < len(plan.files) and not journal_path(release.output).exists():
        return frozenset()
    return frozenset(file.path for file in files)


def refuse_while_releasing(workdir: Path, folder: Path) -> None:
    """Other content under the names of half released shards would end in one merged file of both.

    :raises UsageError: a ``merge --consume`` of shards of this folder was interrupted.
    """
    release = release_of(workdir)
    if release is None or not any(shard.is_relative_to(folder) for shard in release.shards):
        return
    journal = journal_path(release.output)
    state = load_journal(journal)
    if state is not None and state.consume:
        raise UsageError(
            f"a merge --consume into {release.output} was interrupted, and its shards are partly released: "
            "no other commit can be fetched in their place",
            hint=f"finish it with `glm5deploy merge --consume`, or delete {journal} and {partial_path(release.output)}",
        )


def bytes_for_merge(context: Context, folder: Path, plan: FetchPlan, released: frozenset[str]) -> int:
    """Room that the merge will still need on the file system of the shards."""
    from glm5deploy.hub.disk import same_file_system

    merge = context.config.merge
    if merge.mode != "always" or len(plan.files) == 1:
        return 0
    output = _output(context, folder, plan)
    if not same_file_system(output, folder):
        return 0
    if merge.consume or released:
        return max((file.size for file in plan.files if file.path not in released), default=0)
    return max(0, plan.size - _allocated(partial_path(output)))


def _output(context: Context, folder: Path, plan: FetchPlan) -> Path:
    """Where the merge stage will write."""
    named, first = context.config.merge.output, plan.paths(folder)[0]
    if named is not None:
        return named.expanduser().absolute()
    name = parse_shard_name(first.name)
    return context.workdir / MERGED / f"{name.prefix if name else first.stem}.gguf"


def _allocated(path: Path) -> int:
    """Bytes on disk that an interrupted merge has reserved or written."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
