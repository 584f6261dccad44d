"""Merge a shard set into one file: resumable at any byte, named only when it is whole and on the disk.

``NAME.gguf.partial`` has the final size from the start, and ``NAME.gguf.partial.journal`` says up to which offset it is
durable. Both are gone when the merge has succeeded.
"""

from __future__ import annotations

from pathlib import Path

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.gguf_files.check import check_not_a_source, check_target, has_header, is_merged
from glm5deploy.gguf_files.copier import Checkpoint
from glm5deploy.gguf_files.journal import JournalState, load_journal
from glm5deploy.gguf_files.merge_job import MergeJob, journal_path, partial_path
from glm5deploy.gguf_files.merge_options import MergeOptions, MergeResult
from glm5deploy.gguf_files.merge_plan import Plan, plan_merge
from glm5deploy.gguf_files.shard_names import parse_shard_name
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.gguf_files.space import explain
from glm5deploy.progress import ProgressSink, ignore_progress


def merge(
    source: Path,
    output: Path,
    options: MergeOptions | None = None,
    *,
    progress: ProgressSink = ignore_progress,
    checkpoint: Checkpoint = lambda _: None,
) -> MergeResult:
    """Merge the set that ``source`` belongs to into the file ``output``, going on where an interrupted run stopped.

    ``checkpoint`` is told whenever something became durable. Raises :class:`DeployError` and its subclasses; whatever
    happened, a later call with the same arguments ends with the same bytes.
    """
    options = options or MergeOptions()
    output = output.absolute()
    size = 0
    try:
        check_target(output)
        state = load_journal(journal_path(output))
        plan = _plan(source, output, options, state)
        size = plan.size
        check_not_a_source(output, partial_path(output), plan)
        job = MergeJob(plan, output, options, progress, checkpoint)
        renamed = state is not None and state.digest == plan.digest and not partial_path(output).exists()
        if state is not None and renamed and has_header(output, plan) and job.began_with(state):
            job.clean_up()
            return MergeResult(output, plan.size)
        if output.exists() and options.existing != "redo":
            if is_merged(output, plan):
                return MergeResult(output, plan.size)
            if options.existing == "replace":
                return job.run(state)
            raise UsageError(
                f"{output}: exists and is not the merge of these shards",
                hint="choose another --output, or --force to replace it once the new file is whole",
            )
        return job.run(state)
    except OSError as error:
        raise explain(error, partial_path(output), size) from error


def _plan(source: Path, output: Path, options: MergeOptions, state: JournalState | None) -> Plan:
    """The plan of the shards at ``source``, or of the journal where ``--consume`` has begun to release them."""
    if state is None or not state.consume:
        return plan_merge(ShardSet.open(source, check_mix=options.check_mix))
    if not options.consume:
        raise UsageError(
            f"{output}: a merge with --consume was interrupted; its shards are partly released",
            hint="run it with --consume again to finish it",
        )
    written = partial_path(output) if partial_path(output).exists() else output
    try:
        with written.open("rb") as file:
            plan = Plan.restore(state.plan, file.read(int(state.plan["header_bytes"])))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{written}: an interrupted --consume merge cannot be read back: {error}") from error
    if plan.digest != state.digest:
        raise FileFormatError(
            f"{written}: is not the file that {journal_path(output).name} describes", hint="fetch the shards again"
        )
    _require_same_set(source, output, plan)
    return plan


def _require_same_set(source: Path, output: Path, plan: Plan) -> None:
    """What a journal wants released must be the very shards that the user names."""
    paths = [Path(shard.path) for shard in plan.sources]
    names = [parse_shard_name(path.name) for path in paths]
    same_set = len({(path.parent, name and name.prefix) for path, name in zip(paths, names, strict=True)}) == 1
    meant = source.absolute()
    if not same_set or None in names or (meant not in paths and meant != paths[0].parent):
        raise UsageError(
            f"{output}: an interrupted merge --consume of other shards is here, those of {paths[0]}",
            hint="finish that one with its own arguments, or choose another --output",
        )
