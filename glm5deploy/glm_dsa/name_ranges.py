"""Many tensor names in few words, for messages that must name every one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def collapse(names: Iterable[str]) -> str:
    """All ``names`` in few words: blocks with the same tensor become a range, ``blk.{3-7,9}.ffn_norm.weight``."""
    by_pattern: dict[str, list[int]] = {}
    for given in names:
        name = given if given.isprintable() else ascii(given)
        blocks = re.findall(r"blk\.(\d+)\.", name)
        by_pattern.setdefault(re.sub(r"blk\.\d+\.", "blk.{}.", name), []).extend(int(b) for b in blocks[:1])
    parts = []
    for pattern, layers in by_pattern.items():
        block = f"{{{_ranges(layers)}}}" if len(layers) > 1 else str(*layers)
        parts.append(pattern.replace("{}", block))
    return ", ".join(parts)


def _ranges(layers: list[int]) -> str:
    runs: list[list[int]] = []
    for layer in sorted(set(layers)):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
