"""The record of an unfinished merge: what it is, and how many of its bytes are on the disk for good.

One JSON object a line: the first describes the plan, each later one a position that was reached. A line is written only
after the bytes it speaks of were flushed, and is flushed itself before anything relies on it; a torn last line is what
an interruption leaves, and is cut off.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5deploy.errors import FileFormatError
from glm5deploy.files import sync_folder
from glm5deploy.gguf_files.identity import Identity

_FORMAT = 1
_MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class JournalState:
    """``position`` counts bytes of the plan's copies in order; ``sha256`` has the digest of each tensor hashed so far.

    ``identities`` are size, inode and mtime (ns) of each source when the merge began.
    """

    plan: dict[str, Any]
    digest: str
    identities: list[Identity]
    consume: bool
    verify: bool
    position: int = 0
    sha256: dict[str, str] = field(default_factory=dict)


class Journal:
    """The journal file of one merge, opened for appending."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path, state: JournalState) -> Journal:
        """Begin a new journal at ``path`` with ``state``'s description; durable on return."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        journal = cls(path, descriptor)
        journal._append(
            {
                "format": _FORMAT,
                "digest": state.digest,
                "identities": state.identities,
                "consume": state.consume,
                "verify": state.verify,
                "plan": state.plan,
            }
        )
        sync_folder(path.parent)
        return journal

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """Open the journal for appending after its last whole line."""
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(descriptor, path.read_bytes().rfind(b"\n") + 1)
        return cls(path, descriptor)

    def reached(self, position: int, sha256: dict[str, str]) -> None:
        """Record that all bytes before ``position`` are durable in the partial file; durable on return."""
        self._append({"position": position, "sha256": sha256})

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, line: dict[str, Any]) -> None:
        data = memoryview(json.dumps(line).encode() + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]
        os.fsync(self._descriptor)


def load_journal(path: Path) -> JournalState | None:
    """The state recorded at ``path``; None if there is none, or none that this program wrote."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        first, *records = [json.loads(line) for line in lines]
        if first["format"] != _FORMAT or not isinstance(first["plan"], dict):
            return None
        return JournalState(
            plan=first["plan"],
            digest=str(first["digest"]),
            identities=[[int(fact) for fact in identity] for identity in first["identities"]],
            consume=first["consume"] is True,
            verify=first["verify"] is True,
            position=int(records[-1]["position"]) if records else 0,
            sha256={str(name): str(digest) for record in records for name, digest in record["sha256"].items()},
        )
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
