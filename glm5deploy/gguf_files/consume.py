"""Give the shards' space back while they are merged: what ``--consume`` does, and undoes nothing of.

A range is released only when its bytes were flushed to the merged file, read back, and the journal says so. A shard
about to be punched is first renamed to ``NAME.gguf.consumed``: a file with holes must not pass for a healthy shard.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from glm5deploy.errors import DiskFullError, UsageError
from glm5deploy.files import free_bytes, sync_folder
from glm5deploy.gguf_files.identity import Identity, identity_of
from glm5deploy.gguf_files.linux_files import can_punch, punch_hole
from glm5deploy.gguf_files.merge_plan import Copy, Plan
from glm5deploy.gguf_files.shards import CONSUMED
from glm5deploy.sizes import human_bytes


class Consumption:
    """Releases the sources of ``plan`` as they are copied."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._paths = [Path(source.path) for source in plan.sources]
        self._last = {copy.source: copy.offset + copy.length for copy in plan.copies}
        self.punching = can_punch(self._paths[0].parent)

    def located(self) -> list[Path | None]:
        """Where each source is now: set aside, under its name, or gone (None)."""
        return [next((p for p in (_aside(path), path) if p.exists()), None) for path in self._paths]

    def check_unchanged(self, identities: Sequence[Identity], journal: Path) -> None:
        """Raise :class:`UsageError` unless all that is left of the shards is what the merge in ``journal`` began with.

        Holes have changed the mtime of a shard that was set aside, so its size and inode must do.
        """
        if len(identities) != len(self._paths):
            raise UsageError(f"{journal}: names {len(identities)} shards of {len(self._paths)}")
        for path, identity in zip(self._paths, identities, strict=True):
            for found, known in ((path, identity), (_aside(path), identity[:2])):
                if found.exists() and identity_of(found)[: len(known)] != known:
                    raise UsageError(
                        f"{found}: is not the file that the interrupted merge --consume began with",
                        hint=f"put that one back, or give the merge up: delete {journal}, the .partial beside it and "
                        "what is left of the shards, then fetch them again",
                    )

    def check(self, output: Path, batch_bytes: int) -> None:
        """Refuse links, and a disk without room for what is copied before the first release."""
        for path in self._paths:
            if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
                raise UsageError(
                    f"{path}: is a link, and --consume would destroy the file behind it",
                    hint="merge without --consume, or fetch the shards into the work folder",
                )
        largest = max((copy.length for copy in self._plan.tensors.values()), default=0)
        needed = max(batch_bytes, largest) if self.punching else max(source.size for source in self._plan.sources)
        free = free_bytes(output.parent)
        if free < needed:
            raise DiskFullError(
                f"{output.parent}: --consume needs {human_bytes(needed)} free, but there are {human_bytes(free)}",
                hint="free that much space and run again",
            )

    def release(self, copies: Sequence[Copy], position: int) -> list[int]:
        """Release what ``copies`` read, all of it durable; remove shards that end before ``position``.

        Returns the numbers of the removed ones: their blocks are free only when nobody has them open any more.
        Btrfs gives blocks back only where a whole extent is punched, so there up to 128 MiB stay until the removal.
        """
        removed = []
        for number in sorted({copy.source for copy in copies}):
            path = self._paths[number]
            if self._last[number] <= position:
                _remove(path)
                _remove(_aside(path))
                removed.append(number)
            elif self.punching:
                self._punch(path, [copy for copy in copies if copy.source == number])
        return removed

    def finish(self) -> None:
        """Remove whatever is left of the shards, those without tensors included."""
        for path in self._paths:
            _remove(path)
            _remove(_aside(path))

    @staticmethod
    def _punch(path: Path, copies: Sequence[Copy]) -> None:
        aside = _aside(path)
        if path.exists():
            path.rename(aside)
            sync_folder(path.parent)
        if not aside.exists():
            return
        descriptor = os.open(aside, os.O_RDWR | os.O_CLOEXEC)
        try:
            for copy in copies:
                punch_hole(descriptor, copy.source_offset, copy.length)
        finally:
            os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + CONSUMED)


def _remove(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    sync_folder(path.parent)
