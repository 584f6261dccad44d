"""What a merge may write to, and whether the file it wrote is what was planned."""

from __future__ import annotations

from pathlib import Path

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.gguf_files.header import read_header
from glm5deploy.gguf_files.identity import is_made_of
from glm5deploy.gguf_files.merge_plan import Plan
from glm5deploy.gguf_files.shard_names import parse_shard_name


def check_target(output: Path) -> None:
    """Raise :class:`UsageError` for an output that no merge may have, whatever it merges."""
    if parse_shard_name(output.name) is not None:
        raise UsageError(
            f"{output}: is named like a shard, and merging must not replace one", hint=f"--output {_plain_name(output)}"
        )
    if output.is_dir():
        raise UsageError(f"{output}: is a folder", hint=f"--output {output / 'MODEL.gguf'}")
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent}: no such folder", hint=f"mkdir -p {output.parent}")


def check_not_a_source(output: Path, partial: Path, plan: Plan) -> None:
    """Raise :class:`UsageError` if writing would touch a shard, be it by name, hard link or symbolic link."""
    for target in (output, partial):
        for source in plan.sources:
            if target.exists() and Path(source.path).exists() and target.samefile(source.path):
                raise UsageError(f"{target}: is the shard {source.path}", hint="choose another --output")


def has_header(output: Path, plan: Plan) -> bool:
    """Whether ``output`` has the size and the header of ``plan``'s result."""
    try:
        with output.open("rb") as file:
            return output.stat().st_size == plan.size and file.read(len(plan.header)) == plan.header
    except FileNotFoundError:
        return False


def is_merged(output: Path, plan: Plan) -> bool:
    """Whether ``output`` is a finished merge of ``plan``: its size and header, made of the files that are there now.

    A merge gets its name only when every byte is on the disk, so what has the name and the header is whole.
    """
    return has_header(output, plan) and is_made_of(output, [Path(source.path) for source in plan.sources])


def check_written(partial: Path, plan: Plan) -> None:
    """Read the written header back and compare every tensor's place with the plan."""
    header = read_header(partial)
    found = {t.name: (header.data_start + t.offset, t.nbytes) for t in header.tensors}
    planned = {name: (copy.offset, copy.length) for name, copy in plan.tensors.items()}
    if found != planned or header.file_size != plan.size:
        raise FileFormatError(
            f"{partial}: does not hold what was planned", hint="delete it and its .journal, then merge again"
        )


def _plain_name(output: Path) -> Path:
    name = parse_shard_name(output.name)
    return output.with_name(f"{name.prefix if name else output.stem}.gguf")
