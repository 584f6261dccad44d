"""Known GPUs: names as the driver and as people write them, and the data file's plausibility."""

from __future__ import annotations

import pytest

from glm5deploy.errors import DeployError, UsageError
from glm5deploy.hardware.gpus import MIB, SUPPORTED_CC, detect_gpus, find_gpu, known_gpus, parse_gpus, parse_smi


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("rtx pro 6000", "RTX PRO 6000 Blackwell"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40 GB SXM"),
        ("NVIDIA A100-PCIE-40GB", "A100 40 GB PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100 80 GB PCIe"),
        ("a100 40g", "A100 40 GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 5090", "GeForce RTX 5090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GB10", "GB10 (DGX Spark)"),
    ],
)
def test_names_of_the_driver_and_of_people(written: str, name: str) -> None:
    found = find_gpu(written)
    assert found is not None
    assert found.name == name


def test_every_name_in_the_file_finds_itself() -> None:
    assert [find_gpu(gpu.name) for gpu in known_gpus()] == list(known_gpus())


def test_the_data_file_is_plausible() -> None:
    for gpu in known_gpus():
        assert gpu.cc in SUPPORTED_CC, gpu.name
        assert 20 << 30 < gpu.memory_bytes < 300 << 30, gpu.name
        assert gpu.bandwidth is not None
        assert 2e11 < gpu.bandwidth < 1e13, gpu.name
        expected = {"8.0": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(gpu.cc, 99)
        assert gpu.shared_bytes == expected << 10, gpu.name


def test_counts() -> None:
    for text in ("8x RTX PRO 6000", "8 x rtx pro 6000", "8×RTX PRO 6000"):
        assert (parse_gpus(text).count, parse_gpus(text).gpu.name) == (8, "RTX PRO 6000 Blackwell")
    assert parse_gpus("H200").count == 1
    assert parse_gpus("8x RTX PRO 6000").gpu.pcie_only
    assert not parse_gpus("8x H200").gpu.pcie_only


@pytest.mark.parametrize("text", ["8x Radeon", "0x H200", ""])
def test_unknown_gpus_are_refused_with_a_list(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_gpus(text)
    assert "RTX PRO 6000 Blackwell" in str(caught.value.hint)


def test_the_drivers_own_answer() -> None:
    group = parse_smi("NVIDIA H200, 143771, 9.0\nNVIDIA H200, 143771, 9.0\n")
    assert (group.count, group.gpu.memory_bytes, group.gpu.bandwidth) == (2, 143771 * MIB, 4.8e12)
    unknown = parse_smi("NVIDIA RTX 9999, 65536, 12.0\n").gpu
    assert (unknown.memory_bytes, unknown.bandwidth, unknown.shared_bytes) == (65536 * MIB, None, 99 << 10)
    unified = parse_smi("NVIDIA GB10, [N/A], 12.1\n").gpu
    assert unified.memory_bytes == 122502 * MIB


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("NVIDIA H200, 143771, 9.0\nNVIDIA A100-SXM4-80GB, 81920, 8.0\n", "differ"),
        ("No devices were found", "unexpected"),
        ("NVIDIA Strange, [N/A], 12.1\n", "no memory size"),
    ],
)
def test_machines_that_cannot_be_planned_for(answer: str, words: str) -> None:
    with pytest.raises(DeployError, match=words):
        parse_smi(answer)


def test_a_machine_without_a_driver_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeployError, match="no NVIDIA GPU was found") as caught:
        detect_gpus()
    assert '--gpus "8x RTX PRO 6000"' in str(caught.value.hint)
