"""The machine's GPUs as a start needs them: there, equal, free, and able to reach each other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from glm5deploy.checks import Check
from glm5deploy.hardware.gpu_checks import check_driver, check_gpus
from glm5deploy.hardware.nvml import Driver, GpuState, describe, read_driver, visible
from glm5deploy.hardware.topology import (
    PcieSettings,
    Topology,
    check_links,
    custom_all_reduce_works,
    read_pcie,
    read_topology,
)

COLLECTIVE_SECONDS = 60.0  # 20 for the ranks to meet and sum, the rest for importing torch from a cold disk


@dataclass(frozen=True, slots=True)
class Machine:
    """What was found; ``gpus`` are those that CUDA shows, in its order."""

    driver: Driver | None
    gpus: tuple[GpuState, ...]
    topology: Topology | None
    pcie: PcieSettings

    def indices(self, ranks: int) -> list[int]:
        return [gpu.index for gpu in self.gpus[:ranks]]

    def custom_all_reduce(self, ranks: int) -> bool:
        """Whether vLLM's custom all-reduce may be left on for ``ranks`` GPUs."""
        return custom_all_reduce_works(self.topology, self.indices(ranks))


def read_machine(environment: Mapping[str, str] = os.environ) -> Machine:
    driver = read_driver()
    gpus = visible(driver.gpus, environment) if driver else ()
    return Machine(driver, gpus, read_topology(), read_pcie())


def gpu_state() -> str:
    """A text about the GPUs right now."""
    return describe(read_driver())


def gpu_checks(machine: Machine, ranks: int) -> list[Check]:
    """Everything that can be told without using a GPU."""
    return [
        check_driver(machine.driver),
        *check_gpus(machine.gpus, ranks),
        check_links(machine.topology, machine.pcie, machine.indices(ranks)),
    ]


def check_collectives(ranks: int, device: str = "cuda", seconds: float = COLLECTIVE_SECONDS) -> Check:
    """Let ``ranks`` processes all-reduce, before anything large is loaded."""
    command = [sys.executable, "-m", "glm5deploy.vllm_plugin.collective_probe", str(ranks), device, str(seconds)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = child.communicate(timeout=seconds + 60)
    except subprocess.TimeoutExpired:
        out, err = "", f"no answer after {seconds + 60:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    try:
        report = json.loads(out.splitlines()[-1]) if out else {}
    except ValueError:
        report = {}
    if report.get("ok"):
        times = ", ".join(f"{size} kB {time:g} µs" for size, time in report["microseconds"].items())
        return Check("all-reduce", "ok", f"{ranks} ranks: {times}")
    told = report.get("error") or (err.strip().splitlines() or ["it ended without a word"])[-1]
    return Check(
        "all-reduce",
        "fail",
        f"{ranks} ranks: {told}",
        "try NCCL_P2P_DISABLE=1; if that helps, switch off IOMMU and ACS; NCCL_DEBUG=INFO tells more",
    )
