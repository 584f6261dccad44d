"""The small JSON files beside a download."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from glm5deploy.files import read_json, write_json

STATE_FOLDER = ".fetch"
"""Below the download folder: the plan, partial files with their sidecars, and what has been verified."""


def write_record(path: Path, value: Mapping[str, object]) -> None:
    """Replace ``path`` whole. An older record after a power cut costs work, not correctness."""
    write_json(path, value, sync_name=False)


def read_record(path: Path) -> dict[str, object]:
    """The record, or an empty one when the file is absent, too large or damaged: then the work is done again."""
    try:
        return read_json(path) or {}
    except (OSError, ValueError):
        return {}


def state_folder(destination: Path) -> Path:
    """``destination/.fetch``, made when needed, and ignored by git."""
    folder = destination / STATE_FOLDER
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    return folder
