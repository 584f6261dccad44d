from __future__ import annotations

import pytest

from glm5deploy.hardware.nvml import Driver, GpuState
from glm5deploy.hardware.topology import PcieSettings, parse_topology
from glm5deploy.stages.gpu_preflight import Machine, check_collectives, gpu_checks

PCIE = "GPU0 X PHB PHB\nGPU1 PHB X PHB\nGPU2 PHB PHB X\n"
GPUS = tuple(GpuState(index, f"GPU-{index}", "A100", 80 << 30, 80 << 30, "8.0") for index in range(3))


def test_a_machine_is_judged_by_the_gpus_that_are_used() -> None:
    machine = Machine(Driver("580.1", "13.0", GPUS), GPUS, parse_topology(PCIE), PcieSettings("off", 0))
    assert [(check.name, check.level) for check in gpu_checks(machine, 3)] == [
        ("driver", "ok"),
        ("GPUs", "ok"),
        ("capability", "ok"),
        ("GPU memory", "ok"),
        ("GPU links", "ok"),
    ]
    assert machine.custom_all_reduce(2)
    assert not machine.custom_all_reduce(3)
    reordered = Machine(machine.driver, GPUS[::-1], machine.topology, machine.pcie)
    assert reordered.indices(2) == [2, 1]


def test_a_machine_without_a_driver_says_so_once() -> None:
    checks = gpu_checks(Machine(None, (), None, PcieSettings("off", None)), 1)
    assert [(check.name, check.level) for check in checks] == [
        ("driver", "fail"),
        ("GPUs", "fail"),
        ("GPU links", "ok"),
    ]


@pytest.mark.slow
def test_two_ranks_sum_over_gloo() -> None:
    check = check_collectives(2, "cpu")
    assert check.level == "ok"
    assert check.found.startswith("2 ranks: 12 kB ")
    assert check.found.count("µs") == 4


def test_ranks_that_do_not_meet_in_time_are_named() -> None:
    check = check_collectives(2, "cpu", seconds=0.5)
    assert check.level == "fail"
    assert check.found.startswith("2 ranks: rank 0 was still ")
    assert "NCCL_P2P_DISABLE=1" in check.remedy
