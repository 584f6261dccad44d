"""Where a GGUF file's tensors lie, and whether they can lie there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import GgmlType

LARGEST_ALIGNMENT = 1 << 20
_CUT = "the file is cut or damaged: fetch it again"


def padded(size: int, alignment: int) -> int:
    """``size`` rounded up to a multiple of ``alignment``."""
    return -(-size // alignment) * alignment


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` in GGUF's order (fastest dimension first), ``offset`` from the start of the data."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Tensors of the file ``name`` of ``size`` bytes whose tensor infos end at ``infos_end``."""

    name: str
    size: int
    infos_end: int
    tensors: tuple[TensorInfo, ...]

    def fitting_alignment(self, alignments: Sequence[int]) -> int:
        """The alignment by which every tensor fits; of several, the one that ends exactly where the file ends.

        Raises :class:`FileFormatError` if none does, or if tensors overlap or reach past the file's end.
        """
        possible = [a for a in alignments if all(t.offset % a == 0 for t in self.tensors)] or list(alignments)
        if not self.tensors or len({padded(self.infos_end, a) for a in possible}) == 1:
            self._check(possible[0])
            return possible[0]
        end = max(t.offset + t.nbytes for t in self.tensors)
        for alignment in possible:
            start = padded(self.infos_end, alignment)
            if self.size in (start + end, start + padded(end, alignment)):
                self._check(alignment)
                return alignment
        raise FileFormatError(
            f"{self.name}: carries no general.alignment, and its size {self.size} fits none of {list(alignments)}",
            hint=_CUT,
        )

    def _check(self, alignment: int) -> None:
        start = padded(self.infos_end, alignment)
        previous_end, previous = 0, ""
        for tensor in sorted(self.tensors, key=lambda t: t.offset):
            where = f"{self.name}: at offset {start + tensor.offset}: tensor {tensor.name!r}"
            if tensor.offset % alignment:
                raise FileFormatError(f"{where} is not aligned to {alignment} bytes")
            if start + tensor.offset + tensor.nbytes > self.size:
                raise FileFormatError(
                    f"{where} needs {tensor.nbytes} bytes, but the file ends at {self.size}", hint=_CUT
                )
            if tensor.offset < previous_end:
                raise FileFormatError(f"{where} overlaps {previous!r}, which ends at {start + previous_end}")
            previous_end, previous = tensor.offset + tensor.nbytes, tensor.name
