"""What file names in a repository say: sets of shards, quantisation labels, and names that must be refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm5deploy.errors import HubError
from glm5deploy.gguf_files.shard_names import ShardName, parse_shard_name

# A label is the type that llama-quantize names, with the marks that makers of mixed quantisations put before it.
_TYPE = r"(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|BF16|FP?16|F32|FP8(?:_[A-Za-z0-9]+)*|MXFP4(?:_[A-Za-z0-9]+)*|NVFP4)"
_LABEL = re.compile(rf"(?:^|[-.])(?P<label>(?:(?:UD|i1|smol)-)*{_TYPE})$", re.IGNORECASE)
_COMPONENT_BYTES = 200  # leaves room for our suffixes within the 255 bytes of common file systems


@dataclass(frozen=True, slots=True)
class GgufName:
    """A GGUF's path taken apart. ``shard`` is None for a file that is not split, which counts as shard 1 of 1."""

    folder: str
    name: str
    shard: ShardName | None

    @property
    def stem(self) -> str:
        return self.shard.prefix if self.shard else self.name.removesuffix(".gguf")

    @property
    def number(self) -> int:
        return self.shard.number if self.shard else 1

    @property
    def count(self) -> int:
        return self.shard.count if self.shard else 1

    @property
    def one_set(self) -> tuple[str, str, int, int]:
        """What all shards of a set have in common."""
        return self.folder, self.stem, self.count, self.shard.width if self.shard else 0

    def sibling(self, number: int) -> str:
        """The path of shard ``number`` of the same set."""
        name = self.shard.sibling(number) if self.shard else self.name
        return f"{self.folder}/{name}" if self.folder else name


def parse_gguf_name(path: str) -> GgufName | None:
    """``folder/stem-0000N-of-0000M.gguf`` or ``folder/stem.gguf``; None for anything that is not a GGUF."""
    folder, _, name = path.rpartition("/")
    if not name.endswith(".gguf") or name == ".gguf":
        return None
    return GgufName(folder, name, parse_shard_name(name))


def quant_label(name: str) -> str | None:
    """The quantisation a folder's name or a file's stem ends in: ``GLM-5.2-UD-Q4_K_XL`` → ``UD-Q4_K_XL``."""
    match = _LABEL.search(name)
    return match["label"] if match else None


def check_repository_path(path: object) -> str:
    """The path itself when it can be joined below a folder and stays there.

    :raises HubError: not a string, absolute, with ``..``, empty or over-long components, backslashes, drive letters
        or control characters.
    """
    if not isinstance(path, str):
        raise HubError(f"the hub's listing has a file name that is not text: {path!r}"[:200])
    components = path.split("/")
    bad = (
        any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > _COMPONENT_BYTES for part in components)
        or any(character in "\\:" or not character.isprintable() for character in path)
        or components[0] == ".fetch"
    )
    if bad:
        raise HubError(
            f"the hub's listing has a file name that leaves the download folder or cannot be stored: {path!r}"[:300],
            hint="do not use this repository; tell its owner",
        )
    return path
