"""Whether the GPUs are there, equal, free and of a kind that is supported."""

from __future__ import annotations

from collections.abc import Sequence

from glm5deploy.checks import Check
from glm5deploy.hardware.gpus import SUPPORTED_CC
from glm5deploy.hardware.nvml import Driver, GpuState

_FREE_SHARE = 0.95  # of a GPU's memory: a desktop or another process takes more than the rest
_OLDEST_DRIVER = 570  # major version that CUDA 12.8 wheels need
_GIB = 1 << 30


def check_driver(driver: Driver | None) -> Check:
    if driver is None:
        return Check(
            "driver", "fail", "no NVIDIA driver answers", "install the driver; `nvidia-smi` must list the GPUs"
        )
    major = driver.version.partition(".")[0]
    found = f"{driver.version}, CUDA {driver.cuda}"
    if not major.isdigit() or int(major) < _OLDEST_DRIVER:
        return Check("driver", "fail", found, f"update the driver to {_OLDEST_DRIVER} or newer")
    if driver.cuda == "13.2":
        return Check("driver", "warn", f"{found}: poor answers were reported with it", "prefer a driver with CUDA 13.1")
    return Check("driver", "ok", found)


def check_gpus(gpus: Sequence[GpuState], ranks: int) -> list[Check]:
    """Checks of the ``ranks`` first visible GPUs, which are those vLLM takes."""
    if len(gpus) < ranks:
        return [
            Check(
                "GPUs",
                "fail",
                f"{len(gpus)} visible, {ranks} wanted",
                f"--tp {max(1, len(gpus))}, or look at CUDA_VISIBLE_DEVICES",
            )
        ]
    used = gpus[:ranks]
    return [_equal(used), _capability(used), _free(used)]


def _equal(gpus: Sequence[GpuState]) -> Check:
    kinds = sorted({f"{gpu.name} ({gpu.memory / _GIB:.0f} GiB)" for gpu in gpus})
    if len(kinds) > 1:
        return Check(
            "GPUs",
            "fail",
            f"of different kinds: {', '.join(kinds)}",
            "choose equal ones with CUDA_VISIBLE_DEVICES; the smallest would decide for all",
        )
    return Check("GPUs", "ok", f"{len(gpus)} × {kinds[0]}")


def _capability(gpus: Sequence[GpuState]) -> Check:
    odd = sorted({gpu.cc for gpu in gpus if gpu.cc not in SUPPORTED_CC})
    if odd:
        return Check(
            "capability",
            "fail",
            f"compute capability {', '.join(odd)}",
            f"supported are {', '.join(SUPPORTED_CC)}",
        )
    return Check("capability", "ok", f"{gpus[0].cc}: GLM5_TRITON_SPARSE")


def _free(gpus: Sequence[GpuState]) -> Check:
    busy = [gpu for gpu in gpus if gpu.free < gpu.memory * _FREE_SHARE]
    if busy:
        words = [f"GPU {g.index} has {g.free / _GIB:.1f} of {g.memory / _GIB:.1f} GiB free{_by(g)}" for g in busy]
        return Check("GPU memory", "fail", "; ".join(words), "end those processes, or choose other GPUs")
    return Check("GPU memory", "ok", f"{min(gpu.free for gpu in gpus) / _GIB:.1f} GiB free on each")


def _by(gpu: GpuState) -> str:
    return f" (process {', '.join(str(pid) for pid, _ in gpu.processes)})" if gpu.processes else ""
