"""Small file systems of a chosen kind in loop-mounted images, for what differs between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

#: command that makes the file system, and the Debian package it is in
MAKERS = {
    "ext4": (["mkfs.ext4", "-q", "-F", "-m", "0"], "e2fsprogs"),
    "xfs": (["mkfs.xfs", "-q", "-f", "-m", "reflink=1"], "xfsprogs"),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], "btrfs-progs"),
}

#: read before a test's environment is cleaned
_REQUIRED = bool(os.environ.get("GLM5DEPLOY_REQUIRE_MOUNTS"))


def missing_for(kind: str) -> str:
    """Why ``kind`` cannot be mounted here, or nothing."""
    if os.geteuid() != 0:
        return "mounting a file system image needs root"
    if shutil.which(MAKERS[kind][0][0], path="/usr/sbin:/sbin:/usr/bin:/bin") is None:
        return f"{MAKERS[kind][0][0]} is not installed (apt-get install {MAKERS[kind][1]})"
    if not Path("/dev/loop-control").exists():
        return "this machine has no loop devices"
    return ""


@contextmanager
def mounted(kind: str, folder: Path, megabytes: int) -> Iterator[Path]:
    """A fresh file system of ``kind`` below ``folder``. Where that is impossible the test is skipped, with the reason;
    with ``GLM5DEPLOY_REQUIRE_MOUNTS`` set, as in CI, it fails instead."""
    why = missing_for(kind)
    if why:
        (pytest.fail if _REQUIRED else pytest.skip)(why)
    image, point = folder / f"{kind}.img", folder / kind
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    environment = {**os.environ, "PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
    subprocess.run([*MAKERS[kind][0], str(image)], check=True, capture_output=True, env=environment)
    subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, env=environment)
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True, env=environment)
        image.unlink()
