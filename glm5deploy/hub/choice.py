"""Which files are meant: a repository's GGUFs as sets of shards, and the one set that a quantisation's name picks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from glm5deploy.errors import HubError, UsageError
from glm5deploy.hub.names import GgufName, check_repository_path, parse_gguf_name, quant_label
from glm5deploy.sizes import human_bytes

_NOT_MODELS = ("mmproj-", "imatrix")
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit. ``sha256`` is the LFS object's; small files have git's sha1 of the blob alone."""

    path: str
    size: int
    git_oid: str
    sha256: str | None = None
    xet_hash: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class QuantSet:
    """The shards of one quantisation in order, or a single GGUF.

    ``count`` is how many shards the names promise; ``missing`` holds the first few paths that are not there.
    """

    folder: str
    stem: str
    count: int
    files: tuple[RemoteFile, ...]
    missing: tuple[str, ...]

    @property
    def label(self) -> str:
        """The shortest name a user would give: the folder's label, the stem's label, or the stem."""
        folder = self.folder.rpartition("/")[2]
        return quant_label(folder) or quant_label(self.stem) or self.stem

    @property
    def names(self) -> frozenset[str]:
        """Every name that picks this set."""
        folder, full = self.folder.rpartition("/")[2], f"{self.folder}/{self.stem}" if self.folder else self.stem
        return frozenset({self.label, self.folder, folder, self.stem, full, f"{full}.gguf"} - {""})

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def checked_file(path: object, size: object, git_oid: object, sha256: object, xet_hash: object) -> RemoteFile:
    """An entry of a listing or of a recorded plan, neither of which is trusted.

    :raises HubError: a path that must not be joined, no size, or no hash that content could be checked against.
    """
    name = check_repository_path(path)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise HubError(f"{name} has no usable size: {size!r}"[:200])
    if not isinstance(git_oid, str) or not _HEX40.fullmatch(git_oid):
        raise HubError(f"{name} has no usable git id: {git_oid!r}"[:200])
    if sha256 is not None and not (isinstance(sha256, str) and _HEX64.fullmatch(sha256)):
        raise HubError(f"{name} has no usable sha256: {sha256!r}"[:200])
    xet = xet_hash if isinstance(xet_hash, str) and _HEX64.fullmatch(xet_hash) else None
    return RemoteFile(name, size, git_oid, sha256, xet)


def group_sets(files: Iterable[RemoteFile]) -> list[QuantSet]:
    """All sets of a listing, in the listing's alphabetical order. Projectors and importance matrices are no models."""
    groups: dict[tuple[str, str, int, int], tuple[GgufName, dict[int, RemoteFile]]] = {}
    for file in sorted(files, key=lambda f: f.path):
        name = parse_gguf_name(file.path)
        if name is not None and not file.name.lower().startswith(_NOT_MODELS):
            groups.setdefault(name.one_set, (name, {}))[1][name.number] = file
    sets = []
    for any_, shards in groups.values():
        # The count comes from a file name and can be 999999: look no further than a few missing numbers.
        absent = islice((n for n in range(1, any_.count + 1) if n not in shards), 3)
        missing = tuple(any_.sibling(n) for n in absent)
        sets.append(QuantSet(any_.folder, any_.stem, any_.count, tuple(shards[n] for n in sorted(shards)), missing))
    return sets


def choose_set(sets: Sequence[QuantSet], quant: str, repo: str) -> QuantSet:
    """The one complete set that ``quant`` names: a folder, a label, a stem, exactly or else in another case.

    An empty ``quant`` is enough where the repository has a single set. Part of a name never matches: ``Q4_K_XL`` is
    not ``UD-Q4_K_XL``.

    :raises UsageError: no set or several sets have that name; lists the alternatives with their sizes.
    :raises HubError: the set lacks shards; names them.
    """
    if not sets:
        raise HubError(f"{repo} has no GGUF files", hint="look for a repository whose name ends in -GGUF")
    found = [s for s in sets if quant in s.names] if quant else list(sets)
    if not found:
        found = [s for s in sets if quant.lower() in {name.lower() for name in s.names}]
    if not found:
        raise UsageError(f"{repo} has no quantisation {quant!r}", hint=f"it has {describe(sets)}")
    if len(found) > 1:
        what = f"{len(found)} sets named {quant!r}" if quant else f"{len(found)} quantisations and none was named"
        raise UsageError(f"{repo} has {what}", hint=f"choose one of {describe(found)}")
    chosen = found[0]
    if chosen.missing:
        absent = chosen.count - len(chosen.files)
        shown = ", ".join(chosen.missing) + (" …" if absent > len(chosen.missing) else "")
        raise HubError(
            f"{repo}: {chosen.label} is incomplete, {absent} of {chosen.count} shards are missing: {shown}",
            hint="the upload is unfinished; try a later revision or another quantisation",
        )
    return chosen


def describe(sets: Sequence[QuantSet]) -> str:
    """``UD-Q4_K_XL (11 shards, 430.2 GB), …``; sets that share a label are shown with their full name."""
    labels = [s.label for s in sets]
    parts = []
    for s in sorted(sets, key=lambda s: s.size):
        shown = s.label if labels.count(s.label) == 1 else f"{s.folder}/{s.stem}".lstrip("/")
        shards = f"{len(s.files)} shards, " if len(s.files) > 1 else ""
        parts.append(f"{shown} ({shards}{human_bytes(s.size)})")
    return ", ".join(parts)
