"""Typed, bounded reads from a GGUF's metadata mapping: every failure names the key and what it holds."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from glm5deploy.errors import FileFormatError

Metadata = Mapping[str, object]

# No dimension of a model comes near; a larger number is a damaged or hostile header.
LARGEST_SIZE = 2**31 - 1


def describe(value: object) -> str:
    """A value for an error message: short, whatever the file holds."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    if is_array(value):
        return f"an array of {len(value)} values"
    return repr(value)


def is_array(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def read_size(
    metadata: Metadata, key: str, *, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE
) -> int:
    """The integer under ``key``, within ``least..most``; ``default`` when the key is absent, or an error naming it."""
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise missing(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise FileFormatError(f"metadata key {key} must be an integer, the file holds {describe(value)}")
    if not least <= value <= most:
        raise FileFormatError(f"metadata key {key} must lie in {least}..{most}, the file holds {value}")
    return value


def read_float32(metadata: Metadata, key: str, *, default: float | None = None) -> float:
    """The positive float under ``key``, as the shortest decimal of the same float32 (1e-05, not 9.999999747e-06)."""
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise missing(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileFormatError(f"metadata key {key} must be a number, the file holds {describe(value)}")
    if not math.isfinite(value) or not 0 < value < 1e30:
        raise FileFormatError(f"metadata key {key} must be a positive finite number, the file holds {value!r}")
    return shortest_float32(float(value))


def shortest_float32(value: float) -> float:
    """The decimal with the fewest digits that rounds to the same float32 as ``value``."""
    stored = struct.pack("<f", value)
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == stored:
            return candidate
    return float(f"{value:.9g}")


def read_flag(metadata: Metadata, key: str, *, default: bool) -> bool:
    value = metadata.get(key)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise FileFormatError(f"metadata key {key} must be a boolean, the file holds {describe(value)}")


def read_string(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise FileFormatError(f"metadata key {key} must be a string, the file holds {describe(value)}")


def missing(key: str) -> FileFormatError:
    return FileFormatError(
        f"metadata key {key} is missing",
        hint="The file was not written by a complete glm-dsa conversion; convert the model again or take another file.",
    )
