"""How the GPUs reach each other, and what of the machine's PCIe set-up makes collectives hang.

On more than two GPUs without NVLink vLLM's custom all-reduce fails; with an active IOMMU or ACS on the bridges NCCL's
peer-to-peer transfers over PCIe stall at the first all-reduce.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from glm5deploy.checks import Check

_ANSI = re.compile(r"\x1b\[[\d;]*m")
_LINKS = {"PIX", "PXB", "PHB", "NODE", "SYS"}
WORDS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between CPU sockets",
}
_DISTANCE = ["PIX", "PXB", "PHB", "NODE", "SYS"]


@dataclass(frozen=True, slots=True)
class Topology:
    """``links[i][j]`` as ``nvidia-smi topo -m`` writes it ("NV18", "PIX", …, "X" on the diagonal)."""

    links: tuple[tuple[str, ...], ...]

    def nvlink(self, gpus: Sequence[int]) -> bool:
        """Whether every pair of ``gpus`` is joined by NVLink."""
        return all(self.links[a][b].startswith("NV") for a, b in combinations(gpus, 2))

    def farthest(self, gpus: Sequence[int]) -> str:
        """The worst PCIe link between two of ``gpus``; "" when all are joined by NVLink."""
        kinds = {self.links[a][b] for a, b in combinations(gpus, 2)}
        found = [kind for kind in _DISTANCE if kind in kinds]
        return found[-1] if found else ""


@dataclass(frozen=True, slots=True)
class PcieSettings:
    """``iommu``: "off", "pass-through" or "translating"; ``acs``: bridges that redirect peers (None: unknown)."""

    iommu: str
    acs: int | None


def parse_topology(text: str) -> Topology | None:
    """The matrix of ``nvidia-smi topo -m``; None when there is none in ``text``."""
    rows = []
    columns = None
    for line in _ANSI.sub("", text).splitlines():
        words = line.split()
        if columns is None and "GPU0" in words and "X" not in words:
            columns = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in words)
        if words and re.fullmatch(r"GPU\d+", words[0]) and len(words) > 1:
            cells = []
            for word in words[1:]:
                if word != "X" and word not in _LINKS and not re.fullmatch(r"NV\d+", word):
                    break
                cells.append(word)
            if cells:
                rows.append((int(words[0][3:]), cells))
    count = len(rows)
    if (
        not rows
        or columns not in (None, count)
        or [index for index, _ in rows] != list(range(count))
        or any(len(c) < count for _, c in rows)
    ):
        return None
    matrix = tuple(tuple(cells[:count]) for _, cells in rows)
    return Topology(matrix) if all(matrix[i][i] == "X" for i in range(count)) else None


def read_topology() -> Topology | None:
    """The topology of this machine; None without ``nvidia-smi``."""
    return parse_topology(_output(["nvidia-smi", "topo", "-m"]))


def parse_pcie(cmdline: str, iommu_groups: int, lspci: str | None) -> PcieSettings:
    """From ``/proc/cmdline``, the number of ``/sys/kernel/iommu_groups`` and ``lspci -vvv`` (None: not permitted)."""
    options = dict(word.partition("=")[::2] for word in cmdline.split())
    if iommu_groups == 0:
        iommu = "off"
    elif options.get("iommu") == "pt" or options.get("iommu.passthrough") == "1":
        iommu = "pass-through"
    else:
        iommu = "translating"
    acs = None
    if lspci is not None and "ACSCtl:" in lspci:
        acs = len(re.findall(r"ACSCtl:.*\b(?:SrcValid|ReqRedir|CmpltRedir)\+", lspci))
    return PcieSettings(iommu, acs)


def read_pcie() -> PcieSettings:
    groups = Path("/sys/kernel/iommu_groups")
    try:
        cmdline = Path("/proc/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        cmdline = ""
    return parse_pcie(
        cmdline, len(list(groups.iterdir())) if groups.is_dir() else 0, _output(["lspci", "-vvv"]) or None
    )


def custom_all_reduce_works(topology: Topology | None, gpus: Sequence[int]) -> bool:
    """vLLM's custom all-reduce: fine on two GPUs or with NVLink between all; unknown counts as not."""
    return len(gpus) <= 2 or (topology is not None and topology.nvlink(gpus))


def check_links(topology: Topology | None, pcie: PcieSettings, gpus: Sequence[int]) -> Check:
    """What the links between ``gpus`` mean for a tensor-parallel start."""
    if len(gpus) < 2:
        return Check("GPU links", "ok", "one GPU needs none")
    if topology is None:
        return Check("GPU links", "warn", "unknown: nvidia-smi topo -m tells nothing", "look at it by hand")
    if topology.nvlink(gpus):
        return Check("GPU links", "ok", f"NVLink between all {len(gpus)} GPUs")
    found = f"PCIe over {WORDS.get(topology.farthest(gpus), 'an unknown link')}"
    if pcie.iommu == "translating" or pcie.acs:
        cause = "the IOMMU translates" if pcie.iommu == "translating" else f"ACS is on at {pcie.acs} bridges"
        return Check(
            "GPU links",
            "warn",
            f"{found}, and {cause}: peer-to-peer transfers may stall at the first all-reduce",
            "boot with iommu=off (or iommu=pt and ACS off), or serve with NCCL_P2P_DISABLE=1",
        )
    return Check("GPU links", "ok", found)


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
