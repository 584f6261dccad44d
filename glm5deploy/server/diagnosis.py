"""What a server's log says about why it ended: the lines that matter, and known faults with a remedy."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 512 << 10
# "(EngineCore pid=12) ERROR 11-29 17:00:00 [core.py:1] " and parts of it.
_PREFIX = re.compile(r"^(\([\w ]+?pid=\d+\) ?)?((ERROR|WARNING|INFO|CRITICAL) [\d-]+ [\d:.]+ (\[[^\]]*\] )?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::.*|$)")
_USAGE = re.compile(r"\berror: ")
# Wrappers that say no more than that something else failed.
_HOLLOW = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|EngineCore encountered|"
    r"^(KeyboardInterrupt|SystemExit)\b"
)
# What libraries say on the way out of every process.
_FAREWELL = re.compile(r"nanobind|leaked (?:instance|type|function)|resource_tracker|skipped remainder|warnings\.warn")


@dataclass(frozen=True, slots=True)
class Fault:
    """A known cause: what it is called, what to look for in a line, what to do about it."""

    name: str
    pattern: re.Pattern[str]
    remedy: str


def _fault(name: str, pattern: str, remedy: str) -> Fault:
    return Fault(name, re.compile(pattern, re.IGNORECASE), remedy)


FAULTS: tuple[Fault, ...] = (
    _fault(
        "GPU out of memory",
        r"cuda out of memory|OutOfMemoryError|CUDA error: out of memory|No available memory for the cache blocks",
        "lower --context or --max-seqs, or use more GPUs (--tp); `glm5deploy plan` shows what fits",
    ),
    _fault(
        "KV cache too small",
        r"larger than the maximum number of tokens that can be stored in KV cache|KV cache is needed, which is larger",
        "lower --context to what the message says fits, or give the cache more memory",
    ),
    _fault(
        "host out of memory",
        r"\bMemoryError\b|cannot allocate memory|std::bad_alloc|Killed process \d+|DefaultCPUAllocator: can't allocate",
        "free host memory or raise the memory limit of the container; the CPU engine holds all weights in it",
    ),
    _fault(
        "NCCL time-out",
        r"collective operation timeout|NCCL.*(?:timeout|timed out)|nccl(?:System|UnhandledCuda|Remote)Error",
        "try NCCL_P2P_DISABLE=1, or switch off IOMMU/ACS; `glm5deploy doctor` looks at the topology",
    ),
    _fault(
        "GPU error (Xid)",
        r"NVRM: Xid|\bXid\b.*\b\d+|uncorrectable ECC error|GPU has fallen off the bus|CUDA error: unspecified launch",
        "`nvidia-smi -q` and `dmesg` name the GPU; reset or replace it before serving again",
    ),
    _fault(
        "illegal memory access",
        r"illegal memory access|device-side assert",
        "start again with CUDA_LAUNCH_BLOCKING=1 to see the kernel, and report it with the log",
    ),
    _fault(
        "load took too long",
        r"Timed out waiting for engine core|VLLM_ENGINE_READY_TIMEOUT_S",
        "give it more time with --ready-timeout, and look at the disk's read rate",
    ),
    _fault("disk full", r"No space left on device|Errno 28", "free space on the disk that the message names"),
    _fault("port in use", r"Address already in use|Errno 98", "choose another --port or stop the other server"),
    _fault(
        "shared memory too small",
        r"/dev/shm|Bus error",
        "raise the size of /dev/shm (docker: --shm-size or --ipc=host)",
    ),
)


def read_tail(log: Path, limit: int = _TAIL_BYTES) -> list[str]:
    """The last lines of a log, at most ``limit`` bytes; empty when there is none.

    Split as bytes: what text quotes of a request may hold characters that ``str.splitlines`` takes for an end.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - limit))
            return [line.decode("utf-8", "replace") for line in file.read(limit).splitlines()]
    except FileNotFoundError:
        return []


def find_faults(lines: list[str]) -> list[tuple[Fault, str]]:
    """The known faults in ``lines`` with the first line that shows each, in the order of the lines."""
    found: dict[str, tuple[Fault, str]] = {}
    for line in lines:
        for fault in FAULTS:
            if fault.name not in found and fault.pattern.search(line):
                found[fault.name] = (fault, bare(line))
    return list(found.values())


def telling_lines(log: Path, most: int = 4) -> list[str]:
    """The lines to show a person: exceptions and usage errors without repetition, else the last lines."""
    lines = [bare(line) for line in read_tail(log) if not _FAREWELL.search(line)]
    errors = list(dict.fromkeys(line for line in lines if _EXCEPTION.match(line) or _USAGE.search(line)))
    solid = [line for line in errors if not _HOLLOW.search(line)]
    chosen = (solid or errors)[:most] or [line for line in lines if line.strip()][-most:]
    return [line[:400] for line in chosen]


def bare(line: str) -> str:
    """A log line without process, level, time and place."""
    return _PREFIX.sub("", line).strip()
