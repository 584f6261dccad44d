"""Where a benchmark's model lies: its file in memory, on disk, or less of it; its folder; its server's port."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil

from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.model_folder import build_model_folder, write_model_folder

from .course import Course
from .generate import file_bytes
from .stack import Stack

SPARE = 1 << 30  # bytes to leave free where the file goes
RESERVE = 16 << 30  # of memory, for the engine


def free_memory() -> int:
    """Bytes this process may still take: of the machine, or of its control group where that has a limit."""
    available = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        available = min(available, int(most) - int(used.read_text()))
    return available


def choose_folder(course: Course, stack: Stack, asked: Path | None) -> tuple[Path, Stack]:
    """Where the file fits; with fewer layers, and a line that says so, where it does not."""
    candidates = [asked] if asked else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    free = {place: shutil.disk_usage(place).free for place in candidates if place.is_dir()}
    memory = free_memory()
    places = ", ".join(f"{place} {size / 1e9:.1f} GB" for place, size in free.items())
    course.say(f"free: {places}; memory {memory / 1e9:.1f} GB; {os.cpu_count()} cores")
    if Path("/dev/shm") in free:  # its files take memory, which the engine needs too
        free[Path("/dev/shm")] = min(free[Path("/dev/shm")], memory - RESERVE)
    for layers in range(stack.layers, 0, -1):
        smaller = replace(stack, layers=layers)
        place = next((place for place, size in free.items() if size - SPARE >= file_bytes(smaller)), None)
        if place is not None:
            if layers < stack.layers:
                course.say(
                    f"ONLY {layers} OF {stack.layers} LAYERS FIT: every figure is of {layers} layers, not scaled"
                )
            return Path(tempfile.mkdtemp(prefix="layer-stack-", dir=place)), smaller
    raise RuntimeError("no place for the file of a single layer")


def quick_folder(gguf: Path, folder: Path) -> Path:
    """The model folder that the patch stage writes for a set, without its question to vLLM; files may lack weights."""
    shards = ShardSet.open(gguf)
    made = build_model_folder(shards.metadata, shards.tensors, [(path, path.stat().st_size) for path in shards.paths])
    write_model_folder(folder, made.files)
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
