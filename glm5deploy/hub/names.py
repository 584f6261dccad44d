"""What file names in a repository say: shard numbers, quantisation labels, and names that must be refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

from glm5deploy.errors import HubError

_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
# A label is the type that llama-quantize names, with the marks that makers of mixed quantisations put before it.
_TYPE = r"(?:I?Q\d+(?:_[A-Za-z0-9]+)*|TQ\d_\d|BF16|FP?16|F32|FP8(?:_[A-Za-z0-9]+)*|MXFP4(?:_[A-Za-z0-9]+)*|NVFP4)"
_LABEL = re.compile(rf"(?:^|[-.])(?P<label>(?:(?:UD|i1|smol)-)*{_TYPE})$", re.IGNORECASE)
_COMPONENT_BYTES = 200  # leaves room for our suffixes within the 255 bytes of common file systems


@dataclass(frozen=True, slots=True)
class GgufName:
    """A GGUF's path taken apart. A file that is not split is shard 1 of 1 with ``split`` False."""

    folder: str
    stem: str
    number: int
    count: int
    split: bool

    @property
    def path(self) -> str:
        suffix = f"-{self.number:05d}-of-{self.count:05d}" if self.split else ""
        return f"{self.folder}/{self.stem}{suffix}.gguf" if self.folder else f"{self.stem}{suffix}.gguf"


def parse_gguf_name(path: str) -> GgufName | None:
    """``folder/stem-0000N-of-0000M.gguf`` or ``folder/stem.gguf``; None for anything that is not a GGUF."""
    folder, _, name = path.rpartition("/")
    if not name.endswith(".gguf") or name == ".gguf":
        return None
    base = name.removesuffix(".gguf")
    match = _SPLIT.fullmatch(base)
    if match is None:
        return GgufName(folder, base, 1, 1, False)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        return GgufName(folder, base, 1, 1, False)
    return GgufName(folder, match["stem"], number, count, True)


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
