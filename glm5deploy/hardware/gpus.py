"""Known GPUs: memory, bandwidth, compute capability and links, for planning without the machine at hand."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from glm5deploy.errors import DeployError, UsageError

MIB = 1 << 20
SUPPORTED_CC = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
_DATA = Path(__file__).with_name("gpus.toml")
_COUNTED = re.compile(r"\s*(?P<count>\d{1,4})\s*[x×*]\s*(?P<name>.+)", re.IGNORECASE)
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")


@dataclass(frozen=True, slots=True)
class Gpu:
    """``memory_bytes`` is what the driver reports, ``bandwidth`` and ``link_bandwidth`` are bytes per second (the
    latter of both directions together), ``shared_bytes`` is the shared memory one thread block may use. ``bandwidth``
    and the link are None for a GPU that is here but not in the data file."""

    name: str
    memory_bytes: int
    cc: str
    shared_bytes: int
    bandwidth: float | None
    link: str | None
    link_bandwidth: float | None

    @property
    def pcie_only(self) -> bool:
        """Whether GPUs reach each other over PCIe: vLLM's custom all-reduce then fails with more than two."""
        return self.link == "PCIe"


@dataclass(frozen=True, slots=True)
class GpuGroup:
    """``count`` equal GPUs."""

    count: int
    gpu: Gpu

    def __str__(self) -> str:
        return f"{self.count} × {self.gpu.name}"


def parse_gpus(text: str) -> GpuGroup:
    """``"8x RTX PRO 6000"`` or a name alone. Raises UsageError listing the known GPUs."""
    match = _COUNTED.fullmatch(text)
    count, name = (int(match["count"]), match["name"]) if match else (1, text)
    gpu = find_gpu(name)
    if gpu is None or count < 1:
        raise UsageError(
            f"--gpus {text!r}: " + ("at least one GPU" if gpu else f"{name.strip()!r} is no GPU known here"),
            hint=f'write it as "8x NAME"; known: {", ".join(known.name for known, _ in _known())}',
        )
    return GpuGroup(count, gpu)


def find_gpu(name: str) -> Gpu | None:
    """The first GPU of the data file all of whose words occur in ``name``; None when there is none."""
    words = re.findall(r"[a-z]+\d+[a-z]*|\d+|[a-z]+", name.lower())
    return next((gpu for gpu, match in _known() if all(word in words for word in match)), None)


def detect_gpus() -> GpuGroup:
    """The GPUs of this machine, as the driver reports them. Raises DeployError: none, or of different kinds."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        raise DeployError(
            "no NVIDIA GPU was found on this machine", hint='name the GPUs to plan for: --gpus "8x RTX PRO 6000"'
        )
    return parse_smi(done.stdout)


def parse_smi(text: str) -> GpuGroup:
    """The answer of ``nvidia-smi --query-gpu=name,memory.total,compute_cap`` (CSV, MiB) as one group."""
    rows = [[field.strip() for field in row] for row in csv.reader(io.StringIO(text)) if row]
    if not rows or any(len(row) != 3 for row in rows):
        raise DeployError(f"nvidia-smi answered something unexpected: {text[:200]!r}")
    if len({(row[0], row[1]) for row in rows}) > 1:
        kinds = ", ".join(sorted({row[0] for row in rows}))
        raise DeployError(
            f"the GPUs of this machine differ ({kinds}); tensor parallelism needs equal ones",
            hint="choose some with CUDA_VISIBLE_DEVICES, or name what to plan for with --gpus",
        )
    name, memory, cc = rows[0]
    known = find_gpu(name)
    # Unified memory is not reported ("[N/A]"): there the data file decides.
    mib = int(memory) if memory.isdigit() else None
    if known is None and mib is None:
        raise DeployError(f"nvidia-smi tells no memory size for {name}", hint="name the GPUs with --gpus")
    gpu = Gpu(
        name=name.removeprefix("NVIDIA "),
        memory_bytes=mib * MIB if mib is not None else known.memory_bytes if known else 0,
        cc=cc,
        shared_bytes=_shared_bytes(cc),
        bandwidth=known.bandwidth if known else None,
        link=known.link if known else None,
        link_bandwidth=known.link_bandwidth if known else None,
    )
    return GpuGroup(len(rows), gpu)


def _shared_bytes(cc: str) -> int:
    """Opt-in shared memory of a thread block: 99 KiB unless the capability is one of the data-centre ones."""
    return {"8.0": 163, "9.0": 227, "10.0": 227, "10.3": 227}.get(cc, 99) << 10


@cache
def _known() -> tuple[tuple[Gpu, tuple[str, ...]], ...]:
    entries = tomllib.loads(_DATA.read_text(encoding="utf-8"))["gpu"]
    return tuple(
        (
            Gpu(
                name=entry["name"],
                memory_bytes=entry["memory_mib"] * MIB,
                cc=entry["cc"],
                shared_bytes=entry["shared_kib"] << 10,
                bandwidth=entry["bandwidth_gbs"] * 1e9,
                link=entry["link"],
                link_bandwidth=entry["link_gbs"] * 1e9,
            ),
            tuple(entry["match"]),
        )
        for entry in entries
    )


def known_gpus() -> tuple[Gpu, ...]:
    """Every GPU of the data file."""
    return tuple(gpu for gpu, _ in _known())
