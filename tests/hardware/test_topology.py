"""Machines as `nvidia-smi topo -m`, the kernel's command line and lspci describe them."""

from __future__ import annotations

import pytest

from glm5deploy.hardware.topology import (
    PcieSettings,
    Topology,
    check_links,
    custom_all_reduce_works,
    parse_pcie,
    parse_topology,
)

NVLINK_4 = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tNODE\t0-47\t0\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tNODE\t0-47\t0\t\tN/A
NIC0\tPIX\tNODE\tNODE\tNODE\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PCIE_4 = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPIX\tNODE\tSYS\t0-63\t0
GPU1\tPIX\t X \tNODE\tSYS\t0-63\t0
GPU2\tNODE\tNODE\t X \tSYS\t0-63\t0
GPU3\tSYS\tSYS\tSYS\t X \t64-127\t1
"""
PAIRS = """\
\tGPU0\tGPU1\tGPU2\tGPU3
GPU0\t X \tNV4\tSYS\tSYS
GPU1\tNV4\t X \tSYS\tSYS
GPU2\tSYS\tSYS\t X \tNV4
GPU3\tSYS\tSYS\tNV4\t X
"""
ONE = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n"
QUIET = PcieSettings("off", 0)


def parsed(text: str) -> Topology:
    topology = parse_topology(text)
    assert topology is not None
    return topology


def test_nvlink_between_all() -> None:
    topology = parsed(NVLINK_4)
    assert topology.links[0] == ("X", "NV18", "NV18", "NV18")
    assert topology.nvlink([0, 1, 2, 3])
    assert topology.farthest([0, 1, 2, 3]) == ""
    assert custom_all_reduce_works(topology, [0, 1, 2, 3])
    assert check_links(topology, PcieSettings("translating", 5), [0, 1, 2, 3]).level == "ok"


def test_pcie() -> None:
    topology = parsed(PCIE_4)
    assert not topology.nvlink([0, 1])
    assert (topology.farthest([0, 1]), topology.farthest([0, 1, 2]), topology.farthest(range(4))) == (
        "PIX",
        "NODE",
        "SYS",
    )
    assert custom_all_reduce_works(topology, [0, 1])
    assert not custom_all_reduce_works(topology, [0, 1, 2])
    assert check_links(topology, QUIET, range(4)).found == "PCIe over the link between CPU sockets"


def test_pairs_are_not_a_whole() -> None:
    topology = parsed(PAIRS)
    assert topology.nvlink([0, 1])
    assert topology.nvlink([2, 3])
    assert not custom_all_reduce_works(topology, range(4))


def test_one_gpu_and_none() -> None:
    assert check_links(parsed(ONE), QUIET, [0]).level == "ok"
    assert check_links(None, QUIET, [0, 1]).level == "warn"
    assert not custom_all_reduce_works(None, range(3))


@pytest.mark.parametrize(
    "text",
    ["", "No devices were found", "GPU0 PIX X\nGPU1 X PIX\n", PCIE_4.replace("GPU3\tSYS", "")],
)
def test_no_matrix(text: str) -> None:
    assert parse_topology(text) is None


@pytest.mark.parametrize(
    ("pcie", "level", "words"),
    [
        (PcieSettings("off", 0), "ok", "PCIe"),
        (PcieSettings("pass-through", 0), "ok", "PCIe"),
        (PcieSettings("pass-through", None), "ok", "PCIe"),
        (PcieSettings("translating", 0), "warn", "the IOMMU translates"),
        (PcieSettings("pass-through", 4), "warn", "ACS is on at 4 bridges"),
    ],
)
def test_what_stalls_peer_to_peer_transfers(pcie: PcieSettings, level: str, words: str) -> None:
    check = check_links(parsed(PCIE_4), pcie, range(4))
    assert check.level == level
    assert words in check.found
    assert level == "ok" or "NCCL_P2P_DISABLE=1" in check.remedy


@pytest.mark.parametrize(
    ("cmdline", "groups", "iommu"),
    [
        ("BOOT_IMAGE=/vmlinuz root=/dev/sda quiet", 0, "off"),
        ("quiet intel_iommu=off", 0, "off"),
        ("quiet amd_iommu=on iommu=pt", 90, "pass-through"),
        ("iommu.passthrough=1", 3, "pass-through"),
        ("quiet intel_iommu=on", 90, "translating"),
        ("", 90, "translating"),
    ],
)
def test_iommu(cmdline: str, groups: int, iommu: str) -> None:
    assert parse_pcie(cmdline, groups, None) == PcieSettings(iommu, None)


def test_acs_bridges_are_counted() -> None:
    lspci = (
        "00:01.0 PCI bridge\n\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+\n"
        "00:02.0 PCI bridge\n\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd-\n"
        "41:00.0 3D controller\n"
    )
    assert parse_pcie("", 0, lspci).acs == 1
    assert parse_pcie("", 0, "00:01.0 PCI bridge, capabilities: <access denied>").acs is None
