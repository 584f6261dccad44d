"""Tables for logs: every column as wide as its widest word."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line a row; all rows have as many words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{word:>{width}}" for word, width in zip(row, widths, strict=True)) for row in rows]
