"""What a rank reads: its part of a stored tensor, the planes that receive it, and the pieces it is brought in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.planes import Planes


@dataclass(frozen=True, slots=True)
class Source:
    """Matrices of a GGUF tensor: ``experts`` of them, ``rows`` rows each from row ``first`` of ``height``.

    ``name`` is the Hugging Face name it stands for (of expert stacks with ``{expert}``).
    """

    tensor: ShardTensor
    name: str
    rows: int
    experts: int = 1
    first: int = 0
    height: int = 0

    @property
    def columns(self) -> int:
        return self.tensor.shape[0]

    @property
    def planes_type(self) -> str:
        """The type the planes have: the file's own, or bf16 for one that no kernel reads."""
        return self.tensor.type.name if self.tensor.type.name in FORMATS else "BF16"

    @property
    def dense(self) -> bool:
        """True where dense numbers are kept: the file has such, or no kernel reads its type."""
        return FORMATS[self.planes_type].scales is Scales.DENSE


@dataclass(frozen=True, slots=True)
class Slab:
    """``rows`` and ``columns`` of the matrices ``experts`` of a source, and the planes that receive them.

    Planes may have more rows than are read (padding of the vocabulary); those are zeroed.
    """

    source: Source
    target: Planes
    experts: Sequence[int]
    rows: range
    columns: range

    def __post_init__(self) -> None:
        block = self.source.tensor.type.block_elements
        if self.columns.start % block or self.columns.stop % block:
            raise FileFormatError(
                f"{self.source.tensor.name}: columns {self.columns.start} to {self.columns.stop} cut a block of "
                f"{block} {self.source.tensor.type.name} weights",
                hint="Use a smaller tensor-parallel size, or --enable-expert-parallel for routed experts.",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.experts) * len(self.rows) * self.source.tensor.type.nbytes(len(self.columns))


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a slab: experts ``e0`` to ``e1`` of its list, rows ``r0`` to ``r1`` of its range, counted from 0."""

    slab: Slab
    e0: int
    e1: int
    r0: int
    r1: int

    @property
    def transcoded(self) -> bool:
        return self.slab.source.planes_type != self.slab.source.tensor.type.name

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, rows and bytes a row as they are handed to the device."""
        columns = len(self.slab.columns)
        width = 2 * columns if self.transcoded else self.slab.source.tensor.type.nbytes(columns)
        return self.e1 - self.e0, self.r1 - self.r0, width


def pieces(slab: Slab, most: int) -> Iterator[Piece]:
    """Cut a slab into pieces of at most ``most`` bytes of a buffer: some experts, or some rows of one."""
    rows, experts = len(slab.rows), len(slab.experts)
    width = Piece(slab, 0, 1, 0, 1).shape[2]
    if width * rows <= most:
        step = max(1, most // max(1, width * rows))
        for e in range(0, experts, step):
            yield Piece(slab, e, min(e + step, experts), 0, rows)
        return
    step = max(1, most // width)
    for e in range(experts):
        for r in range(0, rows, step):
            yield Piece(slab, e, e + 1, r, min(r + step, rows))
