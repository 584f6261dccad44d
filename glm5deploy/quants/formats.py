"""Every GGML weight type as data: which bits are codes, which bytes are scales, and how a code becomes a value.

All types are described over a *super-block* of 256 weights of one row; types whose own block has 32 weights put eight
blocks in it. A weight is ``scale[group] * (code - offset) - min[group]`` or ``scale[group] * table[code]``. A code has
``low`` bits and, for some types, ``high`` bits stored elsewhere. Block structures are those of ggml-common.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME, ggml_type

SUPER = 256  # weights of a super-block


class Scales(IntEnum):
    """How a super-block's scale bytes turn into one scale (and minimum) a group of weights."""

    DENSE = 0  # no scale: the weight itself
    BLOCK = 1  # a half a block of 32
    BLOCK_MIN = 2  # two halves a block of 32: scale, and a minimum that is added
    K4 = 3  # Q4_K, Q5_K: eight 6-bit scales and eight 6-bit minima in 12 bytes
    K6 = 4  # Q6_K: sixteen signed bytes
    K3 = 5  # Q3_K: sixteen 6-bit scales, 32 too large, in 12 bytes
    K2 = 6  # Q2_K: sixteen bytes, scale in the low and minimum in the high nibble
    X4 = 7  # IQ4_XS: eight 6-bit scales, 32 too large, in 4 + 2 bytes
    E8 = 8  # MXFP4: a power of two a block of 32
    NIBBLE = 9  # IQ3_*, IQ2_XXS: eight nibbles n, scale = d (n + 1/2) factor
    NIBBLE16 = 10  # IQ2_XS, IQ2_S: sixteen nibbles, likewise


@dataclass(frozen=True, slots=True)
class Bits:
    """Code bits inside a block: ``size`` bytes from ``start``; a run of ``run`` bytes holds bits of 8/width runs."""

    start: int
    size: int
    run: int
    width: int


@dataclass(frozen=True, slots=True)
class Format:
    """One type. ``words`` is (start, bytes) of the packed scales in a block, ``halves`` the starts of 16-bit fields."""

    name: str
    scales: Scales
    low: int
    high: int = 0
    offset: int = 0
    table: tuple[int, ...] = ()
    low_bits: Bits | None = None
    high_bits: Bits | None = None
    words: tuple[int, int] = (0, 0)
    halves: tuple[int, ...] = ()
    factor: float = 1.0

    @property
    def block_elements(self) -> int:
        return TYPES_BY_NAME[self.name].block_elements

    @property
    def block_bytes(self) -> int:
        return TYPES_BY_NAME[self.name].block_bytes

    @property
    def blocks(self) -> int:
        """Blocks of the file in a super-block (1 or 8; 256 for the dense types)."""
        return SUPER // self.block_elements

    @property
    def group(self) -> int:
        """Weights that share a scale."""
        return 16 if self.scales in (Scales.K6, Scales.K3, Scales.K2, Scales.NIBBLE16) else 32

    @property
    def has_min(self) -> bool:
        return self.scales in (Scales.BLOCK_MIN, Scales.K4, Scales.K2)

    @property
    def transcoded(self) -> bool:
        """True where planes hold other codes of the same values: a codebook index became a sign and a magnitude."""
        return self.scales in (Scales.NIBBLE, Scales.NIBBLE16)

    @property
    def dense(self) -> bool:
        return self.scales is Scales.DENSE

    @property
    def word_count(self) -> int:
        """32-bit scale words a super-block in the planes."""
        if self.transcoded:
            return 1 if self.scales is Scales.NIBBLE else 2
        return self.words[1] * self.blocks // 4

    @property
    def half_count(self) -> int:
        """16-bit scale fields a super-block in the planes."""
        return len(self.halves) * self.blocks

    @property
    def plane_bytes(self) -> int:
        """Bytes a super-block takes in the planes."""
        return SUPER * (self.low + self.high) // 8 + 4 * self.word_count + 2 * self.half_count

    @property
    def growth(self) -> float:
        """Bytes in GPU memory over bytes in the file, for rows of whole super-blocks."""
        return self.plane_bytes / (self.block_bytes * self.blocks)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ2 = (8, 25, 43, 0)


def _signed(magnitudes: tuple[int, ...]) -> tuple[int, ...]:
    """Table of a code whose top bit is the sign."""
    return magnitudes + tuple(-m for m in magnitudes)


_FORMATS = (
    Format("F32", Scales.DENSE, 16),
    Format("F16", Scales.DENSE, 16),
    Format("BF16", Scales.DENSE, 16),
    Format("Q4_0", Scales.BLOCK, 4, offset=8, low_bits=Bits(2, 16, 16, 4), halves=(0,)),
    Format("Q4_1", Scales.BLOCK_MIN, 4, low_bits=Bits(4, 16, 16, 4), halves=(0, 2)),
    Format("Q5_0", Scales.BLOCK, 4, 1, 16, low_bits=Bits(6, 16, 16, 4), high_bits=Bits(2, 4, 1, 1), halves=(0,)),
    Format("Q5_1", Scales.BLOCK_MIN, 4, 1, low_bits=Bits(8, 16, 16, 4), high_bits=Bits(4, 4, 1, 1), halves=(0, 2)),
    Format("Q8_0", Scales.BLOCK, 8, low_bits=Bits(2, 32, 1, 8), halves=(0,)),
    Format("Q2_K", Scales.K2, 2, low_bits=Bits(16, 64, 32, 2), words=(0, 16), halves=(80, 82)),
    Format(
        "Q3_K",
        Scales.K3,
        2,
        1,
        4,
        low_bits=Bits(32, 64, 32, 2),
        high_bits=Bits(0, 32, 32, 1),
        words=(96, 12),
        halves=(108,),
    ),
    Format("Q4_K", Scales.K4, 4, low_bits=Bits(16, 128, 32, 4), words=(4, 12), halves=(0, 2)),
    Format(
        "Q5_K",
        Scales.K4,
        4,
        1,
        low_bits=Bits(48, 128, 32, 4),
        high_bits=Bits(16, 32, 32, 1),
        words=(4, 12),
        halves=(0, 2),
    ),
    Format(
        "Q6_K",
        Scales.K6,
        4,
        2,
        32,
        low_bits=Bits(0, 128, 64, 4),
        high_bits=Bits(128, 64, 32, 2),
        words=(192, 16),
        halves=(208,),
    ),
    Format("IQ4_NL", Scales.BLOCK, 4, table=_IQ4, low_bits=Bits(2, 16, 16, 4), halves=(0,)),
    Format("IQ4_XS", Scales.X4, 4, table=_IQ4, low_bits=Bits(8, 128, 16, 4), words=(4, 4), halves=(0, 2)),
    Format("MXFP4", Scales.E8, 4, table=_signed(_FP4), low_bits=Bits(1, 16, 16, 4), words=(0, 1)),
    Format("IQ3_XXS", Scales.NIBBLE, 4, table=_signed(_IQ3_XXS), halves=(0,), factor=0.5),
    Format("IQ3_S", Scales.NIBBLE, 4, table=_signed(_IQ3_S), halves=(0,), factor=2.0),
    Format("IQ2_XXS", Scales.NIBBLE, 2, 1, table=_signed(_IQ2), halves=(0,), factor=0.25),
    Format("IQ2_XS", Scales.NIBBLE16, 2, 1, table=_signed(_IQ2), halves=(0,), factor=0.25),
    Format("IQ2_S", Scales.NIBBLE16, 2, 1, table=_signed(_IQ2), halves=(0,), factor=0.25),
)
FORMATS = {f.name: f for f in _FORMATS}


def format_of(type_name: str) -> Format:
    """The format of a GGML type's name; raises :class:`FileFormatError` for one that no kernel here reads."""
    found = FORMATS.get(type_name)
    if found is None:
        raise FileFormatError(
            f"no kernel or dequantisation for weights of type {type_name}",
            hint=f"types that can be served: {', '.join(sorted(FORMATS))}",
        )
    return found


def format_by_id(type_id: int) -> Format:
    """The format of a GGML type id, with the same refusals; ids of other projects are refused by name."""
    return format_of(ggml_type(type_id).name)


def plane_nbytes(type_name: str, rows: int, columns: int) -> int:
    """Bytes of GPU memory that ``rows`` × ``columns`` weights of a type take; what ``inspect`` and ``patch`` report."""
    supers = -(-columns // SUPER)
    return rows * supers * format_of(type_name).plane_bytes
