"""The names of shards as ``llama-gguf-split`` gives them: ``NAME-00002-of-00013.gguf``, counted from 1."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{2,6})-of-(?P<count>[0-9]{2,6})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ShardName:
    """``PREFIX-00002-of-00013.gguf``: ``number`` counts from 1, ``width`` is how many digits both numbers have."""

    prefix: str
    number: int
    count: int
    width: int

    def sibling(self, number: int) -> str:
        return f"{self.prefix}-{number:0{self.width}}-of-{self.count:0{self.width}}.gguf"


def parse_shard_name(file_name: str) -> ShardName | None:
    """The parts of a shard's file name, or None if the name is not one (numbers that cannot be included)."""
    match = _NAME.fullmatch(file_name)
    if match is None or len(match["number"]) != len(match["count"]):
        return None
    number, count = int(match["number"]), int(match["count"])
    return ShardName(match["prefix"], number, count, len(match["count"])) if 1 <= number <= count else None
