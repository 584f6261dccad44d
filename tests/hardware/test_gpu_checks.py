from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from glm5deploy.hardware import nvml
from glm5deploy.hardware.gpu_checks import check_driver, check_gpus
from glm5deploy.hardware.nvml import Driver, GpuState, visible

GIB = 1 << 30


def gpu(index: int, **changes: Any) -> GpuState:
    values = {
        "index": index,
        "uuid": f"GPU-{index:08x}",
        "name": "RTX PRO 6000 Blackwell",
        "memory": 96 * GIB,
        "free": 95 * GIB,
        "cc": "12.0",
        **changes,
    }
    return GpuState(**values)


EIGHT = tuple(gpu(index) for index in range(8))


def levels(*gpus: GpuState, ranks: int | None = None) -> list[tuple[str, str]]:
    return [(check.name, check.level) for check in check_gpus(gpus, ranks or len(gpus))]


def test_eight_equal_free_gpus() -> None:
    checks = check_gpus(EIGHT, 8)
    assert [check.level for check in checks] == ["ok"] * 3
    assert [check.found for check in checks] == [
        "8 × RTX PRO 6000 Blackwell (96 GiB)",
        "12.0: GLM5_TRITON_SPARSE",
        "95.0 GiB free on each",
    ]


def test_too_few() -> None:
    checks = check_gpus(EIGHT[:4], 8)
    assert [(c.level, c.found) for c in checks] == [("fail", "4 visible, 8 wanted")]
    assert "--tp 4" in checks[0].remedy


def test_only_the_gpus_that_are_used_are_looked_at() -> None:
    assert levels(EIGHT[0], gpu(1, name="T4", cc="7.5"), ranks=1) == [
        ("GPUs", "ok"),
        ("capability", "ok"),
        ("GPU memory", "ok"),
    ]


def test_unequal_old_and_busy() -> None:
    assert ("GPUs", "fail") in levels(gpu(0), gpu(1, memory=48 * GIB, free=48 * GIB))
    assert ("capability", "fail") in levels(gpu(0, cc="7.5"))
    busy = check_gpus([gpu(0), gpu(1, free=10 * GIB, processes=((4242, 80 * GIB),))], 2)[-1]
    assert (busy.level, busy.found) == ("fail", "GPU 1 has 10.0 of 96.0 GiB free (process 4242)")


@pytest.mark.parametrize(
    ("driver", "level"),
    [
        (None, "fail"),
        (Driver("535.104.05", "12.2", ()), "fail"),
        (Driver("580.65.06", "13.0", ()), "ok"),
        (Driver("595.10", "13.2", ()), "warn"),
        (Driver("unknown", "", ()), "fail"),
    ],
)
def test_drivers(driver: Driver | None, level: str) -> None:
    assert check_driver(driver).level == level


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3, 4, 5, 6, 7]),
        ("", []),
        ("3,1", [3, 1]),
        ("GPU-00000005, 0", [5, 0]),
        ("2,99,1", [2]),
        ("1,1", [1]),
        ("GPU-0000000", []),
        ("-1", []),
    ],
)
def test_visible_gpus_are_cudas(value: str | None, indices: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [g.index for g in visible(EIGHT, environment)] == indices


class Nvml:
    """The part of NVML's Python interface that is used, as its documentation gives it."""

    class NVMLError(Exception):
        pass

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12080

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB, free=79 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, _: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetUUID(self, _: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetName(self, _: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, _: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=93)

    def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7, usedGpuMemory=None)]


def test_what_nvml_tells() -> None:
    assert nvml._read(Nvml()) == Driver(
        "570.86.15", "12.8", (GpuState(0, "GPU-1", "H200", 80 * GIB, 79 * GIB, "9.0", ((7, 0),), 93),)
    )
    assert nvml.describe(nvml._read(Nvml())) == (
        "driver 570.86.15, CUDA 12.8\nGPU 0 H200 GPU-1: 80896 of 81920 MiB free, 93 % busy, processes 7 (0 MiB)"
    )
    assert nvml.describe(None) == "no NVIDIA driver answers"


def test_a_container_that_hides_processes() -> None:
    class Hidden(Nvml):
        def nvmlDeviceGetComputeRunningProcesses(self, _: int) -> list[SimpleNamespace]:
            raise self.NVMLError("not permitted")

        def nvmlDeviceGetUtilizationRates(self, _: int) -> SimpleNamespace:
            raise self.NVMLError("not supported")

    gpu = nvml._read(Hidden()).gpus[0]
    assert (gpu.processes, gpu.busy_percent) == ((), 0)
