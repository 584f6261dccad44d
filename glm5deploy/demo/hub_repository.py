"""What a hub stores: commits of files by content hash, and the branches that point at them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LFS_THRESHOLD = 10_240
"""Files of at least this many bytes are stored by sha256 behind signed URLs, as the hub stores large files."""

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Blob:
    """One file of a commit. Hashes are computed on first use: a set of hundreds of gigabytes can be published."""

    source: Path
    size: int
    xet_hash: str | None = None

    @cached_property
    def sha256(self) -> str:
        return _digest(self.source, hashlib.sha256())

    @cached_property
    def git_oid(self) -> str:
        """The id git gives the content: sha1 over ``blob <size>\\0`` and the bytes."""
        return _digest(self.source, hashlib.sha1(f"blob {self.size}\0".encode(), usedforsecurity=False))

    @property
    def is_lfs(self) -> bool:
        return self.size >= LFS_THRESHOLD or self.source.suffix == ".gguf"

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_oid


@dataclass
class Repository:
    """A repository's commits (path → blob) and references (branch or tag → commit)."""

    repo_id: str
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def publish(self, files: Path | Mapping[str, Blob], *, ref: str = "main") -> str:
        """Add a commit of all files below a folder (or of ready-made blobs), move ``ref`` to it, return its 40 hex."""
        blobs = dict(files) if isinstance(files, Mapping) else dict(_walk(files))
        listing = "\n".join(f"{path} {blob.etag}" for path, blob in sorted(blobs.items()))
        commit = hashlib.sha1(f"{self.repo_id}\n{listing}".encode(), usedforsecurity=False).hexdigest()
        self.commits[commit] = blobs
        self.refs[ref] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        """A branch, tag or full commit id as a commit id; None when unknown."""
        return revision if revision in self.commits else self.refs.get(revision)


def _walk(folder: Path) -> Iterator[tuple[str, Blob]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), Blob(path, path.stat().st_size)


def _digest(path: Path, hasher: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
