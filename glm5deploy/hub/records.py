"""The small JSON files beside a download: written whole or not at all, and read without trust."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

STATE_FOLDER = ".fetch"
"""Below the download folder: the plan, partial files with their sidecars, and what has been verified."""

_MAX_BYTES = 16 << 20


def write_record(path: Path, value: Mapping[str, object]) -> None:
    """Replace ``path`` atomically and durably (temporary name, fsync, rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path) -> dict[str, object]:
    """The record, or an empty one when the file is absent, too large or damaged: then the work is done again."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def state_folder(destination: Path) -> Path:
    """``destination/.fetch``, made when needed, and ignored by git."""
    folder = destination / STATE_FOLDER
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
