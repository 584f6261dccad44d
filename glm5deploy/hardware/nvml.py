"""The GPUs of this machine as the driver sees them right now: memory in use, processes, driver version."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU. ``memory`` and ``free`` in bytes; ``processes`` on it as (id, bytes); ``cc`` like "9.0"."""

    index: int
    uuid: str
    name: str
    memory: int
    free: int
    cc: str
    processes: tuple[tuple[int, int], ...] = ()
    busy_percent: int = 0


@dataclass(frozen=True, slots=True)
class Driver:
    """``version`` of the NVIDIA driver, ``cuda`` the newest CUDA it serves, like "13.0"; ``gpus`` in driver order."""

    version: str
    cuda: str
    gpus: tuple[GpuState, ...]


def read_driver() -> Driver | None:
    """What NVML tells; None where there is no driver (or no nvidia-ml-py, which every GPU installation brings)."""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return _read(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any) -> Driver:
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        gpus.append(
            GpuState(
                index=index,
                uuid=nvml.nvmlDeviceGetUUID(handle),
                name=nvml.nvmlDeviceGetName(handle).removeprefix("NVIDIA "),
                memory=memory.total,
                free=memory.free,
                cc=f"{major}.{minor}",
                processes=tuple((p.pid, p.usedGpuMemory or 0) for p in _processes(nvml, handle)),
                busy_percent=_busy(nvml, handle),
            )
        )
    return Driver(nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}", tuple(gpus))


def _busy(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # not offered by every GPU, nor under MIG
        return 0


def _processes(nvml: Any, handle: Any) -> list[Any]:
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # not permitted in some containers
        return []


def describe(driver: Driver | None) -> str:
    """A text about every GPU, for a person who was not there."""
    if driver is None:
        return "no NVIDIA driver answers"
    lines = [f"driver {driver.version}, CUDA {driver.cuda}"]
    for gpu in driver.gpus:
        processes = ", ".join(f"{pid} ({used >> 20} MiB)" for pid, used in gpu.processes) or "none"
        lines.append(
            f"GPU {gpu.index} {gpu.name} {gpu.uuid}: {gpu.free >> 20} of {gpu.memory >> 20} MiB free, "
            f"{gpu.busy_percent} % busy, processes {processes}"
        )
    return "\n".join(lines)


def visible(gpus: tuple[GpuState, ...], environment: Mapping[str, str] = os.environ) -> tuple[GpuState, ...]:
    """The GPUs that CUDA will show, in its order: CUDA_VISIBLE_DEVICES holds indices or (beginnings of) UUIDs.

    As in CUDA, the first entry that names no GPU ends the list.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    chosen: list[GpuState] = []
    for word in (part.strip() for part in wanted.split(",")):
        found = [g for g in gpus if word == str(g.index) or (word.startswith("GPU-") and g.uuid.startswith(word))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen.append(found[0])
    return tuple(chosen)
