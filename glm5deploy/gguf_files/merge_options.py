"""What a caller asks of a merge, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from glm5deploy.errors import UsageError
from glm5deploy.gguf_files.linux_files import BLOCK

Mode = Literal["auto", "buffered", "direct"]

_LARGEST_CHUNK = 16 << 20


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How to copy.

    ``mode`` auto takes O_DIRECT for a result larger than half of the memory. ``chunk_bytes`` 0 means 128 KiB through
    the page cache and 4 MiB past it. ``consume`` releases the shards on the way and includes ``verify``, which hashes
    every tensor as it is read and compares with what the disk gives back. ``check_mix`` is :meth:`ShardSet.open`'s.
    ``existing`` says what becomes of a file that is there already: by default the finished merge of the same shards is
    kept and anything else refused; "replace" replaces anything else; "redo" merges anew in any case.
    """

    mode: Mode = "auto"
    chunk_bytes: int = 0
    threads: int = 2
    segment_bytes: int = 16 << 20
    journal_bytes: int = 256 << 20
    reflink: bool = True
    verify: bool = False
    consume: bool = False
    existing: Literal["refuse", "replace", "redo"] = "refuse"
    check_mix: bool = True

    def __post_init__(self) -> None:
        if self.chunk_bytes < 0 or self.chunk_bytes % BLOCK or self.chunk_bytes > _LARGEST_CHUNK:
            raise UsageError(
                f"a chunk of {self.chunk_bytes} bytes is not possible",
                hint=f"a multiple of {BLOCK} up to {_LARGEST_CHUNK}; the default is 128 KiB, 4 MiB with O_DIRECT",
            )


@dataclass(frozen=True, slots=True)
class MergeResult:
    """``copied`` bytes went through memory in this run, ``cloned`` ones are shared with the shards.

    ``resumed_at`` is the offset that an earlier run had reached. ``sha256`` has every tensor's digest if verification
    was on. ``mode`` is "none" if the merged file was there already.
    """

    output: Path
    nbytes: int
    mode: Literal["buffered", "direct", "none"] = "none"
    copied: int = 0
    cloned: int = 0
    resumed_at: int = 0
    sha256: dict[str, str] = field(default_factory=dict)
