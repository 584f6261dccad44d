"""Small durable files: written whole or not at all, and read without trust."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

MAX_JSON_BYTES = 64 << 20
TEMPORARY = ".tmp"
"""End of the names of files that are being written; one that a killed process left means nothing."""


def write_atomically(path: Path, data: bytes, *, sync_name: bool = True) -> None:
    """Write to a temporary name in the same folder, fsync, rename, fsync the folder.

    Without ``sync_name`` a power cut may bring back the old content, whole; cheaper for what is written often.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:  # with the rights that the umask gives, as any other file
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_name:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, object], *, sync_name: bool = True) -> None:
    """:func:`write_atomically` of a JSON object."""
    write_atomically(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), sync_name=sync_name)


def read_json(path: Path) -> dict[str, object] | None:
    """The JSON object in ``path``; ``None`` when there is no such file.

    :raises ValueError: the file is not a JSON object, or is absurdly large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def file_facts(path: Path) -> dict[str, object]:
    """Size in bytes and mtime in nanoseconds: enough to notice a change, cheap enough to ask every time."""
    found = path.stat()
    return {"path": str(path), "size": found.st_size, "mtime_ns": found.st_mtime_ns}


def changed_file(facts: Mapping[str, object]) -> str | None:
    """Why a file is no longer as :func:`file_facts` recorded it, or ``None`` when it is."""
    if not {"path", "size", "mtime_ns"} <= set(facts):
        return "its record does not name the file"
    path = Path(str(facts["path"]))
    try:
        now = file_facts(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if now["size"] != facts["size"]:
        return f"{path} has {now['size']} bytes, not {facts['size']}"
    if now["mtime_ns"] != facts["mtime_ns"]:
        return f"{path} was modified"
    return None


def changed_files(recorded: object) -> list[str]:
    """Why files are no longer as recorded, a reason each; ``recorded`` is a record's list of :func:`file_facts`."""
    if not isinstance(recorded, list) or not recorded:
        return ["the record names no files"]
    reasons = (changed_file(facts) for facts in recorded if isinstance(facts, Mapping))
    return [reason for reason in reasons if reason is not None]


def existing(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    return next(there for there in (path, *path.parents) if there.exists())


def free_bytes(path: Path) -> int:
    """Bytes that an ordinary user may still write in the file system that ``path`` is or will be on."""
    return shutil.disk_usage(existing(path)).free
