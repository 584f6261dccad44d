"""Cut a plan into the pieces that workers copy and the batches that the journal records. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm5deploy.gguf_files.linux_files import BLOCK
from glm5deploy.gguf_files.merge_plan import Copy, Plan


@dataclass(frozen=True, slots=True)
class Segment:
    """One worker's piece. ``tensor`` names the whole tensor that it is, if it is to be hashed."""

    copy: Copy
    tensor: str = ""

    @property
    def end(self) -> int:
        """Offset in the merged file just past it."""
        return self.copy.offset + self.copy.length


def whole_blocks(copy: Copy, position: int) -> Copy | None:
    """The part of ``copy`` from ``position`` on that source and target can share, or None."""
    begin = -(-max(copy.offset, position) // BLOCK) * BLOCK
    end = (copy.offset + copy.length) // BLOCK * BLOCK
    if (copy.source_offset - copy.offset) % BLOCK or begin >= end:
        return None
    return _part(copy, begin, end)


def tensor_segments(plan: Plan, position: int) -> Iterator[Segment]:
    """Whole tensors that begin at ``position`` of the merged file or later, in file order."""
    for name, copy in plan.tensors.items():
        if copy.offset >= position:
            yield Segment(copy, name)


def run_segments(plan: Plan, position: int, step: int, cloned: Sequence[Copy]) -> Iterator[Segment]:
    """Everything from ``position`` on except the ranges in ``cloned``, cut at multiples of ``step`` bytes."""
    for copy in plan.copies:
        begin, end = max(copy.offset, position), copy.offset + copy.length
        for hole in (*(c for c in cloned if begin <= c.offset < end), Copy(0, 0, end, 0)):
            while begin < hole.offset:
                stop = min(hole.offset, (begin // step + 1) * step)
                yield Segment(_part(copy, begin, stop))
                begin = stop
            begin = hole.offset + hole.length


def batches(segments: Iterator[Segment], size: int, *, by_source: bool) -> Iterator[list[Segment]]:
    """Neighbouring segments of up to ``size`` bytes together (one at least), of one source only if ``by_source``."""
    batch: list[Segment] = []
    total = 0
    for segment in segments:
        other_source = by_source and batch and batch[-1].copy.source != segment.copy.source
        if batch and (total + segment.copy.length > size or other_source):
            yield batch
            batch, total = [], 0
        batch.append(segment)
        total += segment.copy.length
    if batch:
        yield batch


def _part(copy: Copy, begin: int, end: int) -> Copy:
    return Copy(copy.source, copy.source_offset + begin - copy.offset, begin, end - begin)
