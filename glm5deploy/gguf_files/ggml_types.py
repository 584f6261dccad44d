"""Sizes of GGML's tensor types: how many bytes a block of so many elements takes.

Ids, names and sizes are those of ggml (``ggml.h``, ``ggml-common.h``) and equal gguf-py 0.19's ``GGML_QUANT_SIZES``.
Types that no published model stores as weights, or that only a fork writes, are known by name alone: an error can say
what was found, and nothing downstream can mistake them for data it understands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from glm5deploy.errors import FileFormatError


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A storage type: ``block_elements`` consecutive elements of a row take ``block_bytes`` bytes."""

    id: int
    name: str
    block_elements: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_elements

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` elements, which must be a multiple of ``block_elements``."""
        return elements // self.block_elements * self.block_bytes


_SIZES = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
)

TYPES: Mapping[int, GgmlType] = MappingProxyType({row[0]: GgmlType(*row) for row in _SIZES})
TYPES_BY_NAME: Mapping[str, GgmlType] = MappingProxyType({t.name: t for t in TYPES.values()})

_REMOVED = "removed from llama.cpp"
_ACTIVATIONS = "a format for activations, never for stored weights"
_NEWER = "a 1- or 2-bit type of newer llama.cpp releases"
_FORK = "a type of the ik_llama.cpp fork"

_FOREIGN: Mapping[int, tuple[str, str]] = MappingProxyType(
    {
        4: ("Q4_2", _REMOVED),
        5: ("Q4_3", _REMOVED),
        9: ("Q8_1", _ACTIVATIONS),
        15: ("Q8_K", _ACTIVATIONS),
        31: ("Q4_0_4_4", _REMOVED),
        32: ("Q4_0_4_8", _REMOVED),
        33: ("Q4_0_8_8", _REMOVED),
        36: ("IQ4_NL_4_4", _REMOVED),
        37: ("IQ4_NL_4_8", _REMOVED),
        38: ("IQ4_NL_8_8", _REMOVED),
        41: ("Q1_0", _NEWER),
        42: ("Q2_0", _NEWER),
        **{
            i: (name, _FORK)
            for i, name in {
                133: "Q6_0",
                134: "IQ1_BN",
                135: "IQ2_BN",
                137: "IQ2_K",
                138: "IQ3_K",
                139: "IQ4_K",
                140: "IQ5_K",
                141: "IQ6_K",
                144: "IQ4_KS",
                145: "IQ2_KS",
                146: "IQ4_KSS",
                152: "IQ5_KS",
                153: "IQ2_KT",
                154: "IQ3_KT",
                155: "IQ4_KT",
                156: "IQ3_KS",
                157: "IQ2_KL",
                158: "IQ1_KT",
            }.items()
        },
    }
)


def ggml_type(type_id: int) -> GgmlType:
    """The type with this id; raises :class:`FileFormatError` naming a type that cannot be used."""
    known = TYPES.get(type_id)
    if known is not None:
        return known
    name, why = _FOREIGN.get(type_id, (f"type {type_id}", _FORK if 100 < type_id < 400 else "unknown to llama.cpp"))
    raise FileFormatError(
        f"unsupported tensor type {name} (id {type_id}): {why}",
        hint=f"choose a quantisation of llama.cpp's own types, such as {', '.join(('Q4_K_M', 'Q8_0', 'UD-Q4_K_XL'))}",
    )
