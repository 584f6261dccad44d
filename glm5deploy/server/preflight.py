"""What can be known to fail before anything is loaded: address, log, limits, shared memory, free memory."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

import psutil

from glm5deploy.checks import Check
from glm5deploy.files import existing, free_bytes
from glm5deploy.server.api_key import ApiKey
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings

_OPEN_FILES = 4096  # vLLM raises its own soft limit, but only as far as the hard one
_SHARED_MEMORY = 64 << 20  # bytes a rank: message queues between the engine and its workers
_LOG_SPACE = 1 << 30
_GIB = 1 << 30


def check_host(settings: ServeSettings, model: ModelFacts, log: Path, key: ApiKey | None) -> list[Check]:
    """Every check of this machine that needs no GPU and no vLLM, in the order to show them."""
    checks = [
        check_port(settings.host, settings.port),
        check_exposure(settings, key),
        check_log(log),
        check_open_files(),
        check_shared_memory(settings.local_ranks),
    ]
    if settings.device == "cpu":
        checks.append(check_memory(settings, model))
    return checks


def check_port(host: str, port: int) -> Check:
    """Bind the address as the server will, and let it go again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return Check(
                    "port", "fail", f"port {port} of {host} is in use{_owner(port)}", f"stop that, or --port {port + 1}"
                )
            if error.errno == errno.EACCES:
                return Check("port", "fail", f"port {port} needs privileges", "choose a --port above 1023")
            if error.errno == errno.EADDRNOTAVAIL:
                return Check("port", "fail", f"this machine has no address {host}", "choose another --host")
            raise
    return Check("port", "ok", f"{host}:{port} is free")


def _owner(port: int) -> str:
    """ " by python3 (process 12)", as far as this user may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return ""
    return ""


def check_exposure(settings: ServeSettings, key: ApiKey | None) -> Check:
    if not settings.loopback_only and key is None:
        return Check(
            "access",
            "warn",
            f"{settings.host} can be reached from other machines and no API key is asked for",
            "give a key with --api-key-file or GLM5DEPLOY_API_KEY, or stay on 127.0.0.1",
        )
    if key is not None and key.readable_by_others:
        return Check("access", "warn", f"other users can read the API key's {key.source}", "chmod 600 it")
    who = "this machine only" if settings.loopback_only else "other machines as well"
    return Check("access", "ok", f"{who}, {'with a key from ' + key.source if key else 'without a key'}")


def check_log(log: Path) -> Check:
    """Whether the log can be written, and the disk has room for it. Writes nothing."""
    there = existing(log)
    if (there != log and not there.is_dir()) or not os.access(there, os.W_OK):
        what = "is no folder" if there != log and not there.is_dir() else "cannot be written"
        return Check("log", "fail", f"no log at {log}: {there} {what}", "choose another folder with --workdir")
    free = free_bytes(there)
    if free < _LOG_SPACE:
        return Check("log", "warn", f"{free >> 20} MiB free for {log}", "free some space; logs and caches need it")
    return Check("log", "ok", str(log))


def check_open_files() -> Check:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _OPEN_FILES:
        return Check(
            "open files", "warn", f"at most {hard} per process", f"ulimit -n {_OPEN_FILES} (as root, or limits.conf)"
        )
    return Check("open files", "ok", "unlimited" if hard == resource.RLIM_INFINITY else f"up to {hard}")


def check_shared_memory(ranks: int) -> Check:
    """Workers exchange messages through /dev/shm; a container's default of 64 MB is too little for several."""
    if not Path("/dev/shm").is_dir():
        return Check("shared memory", "warn", "there is no /dev/shm", "docker: --ipc=host")
    free, wanted = free_bytes(Path("/dev/shm")), ranks * _SHARED_MEMORY
    if free < wanted:
        return Check(
            "shared memory",
            "fail" if ranks > 1 else "warn",
            f"{free >> 20} MiB free in /dev/shm, {ranks} ranks want {wanted >> 20} MiB",
            "docker: --shm-size=8g or --ipc=host",
        )
    return Check("shared memory", "ok", f"{free >> 20} MiB free in /dev/shm")


def check_memory(settings: ServeSettings, model: ModelFacts) -> Check:
    """The CPU engine holds weights in ``dtype`` (at least twice the GGUF's bytes) and a KV cache a rank."""
    free = min(psutil.virtual_memory().available, _cgroup_free())
    wanted = 2 * model.weight_bytes + settings.local_ranks * settings.cpu_kv_gib * _GIB
    if free < wanted:
        return Check(
            "memory",
            "warn",
            f"{free / _GIB:.1f} GiB free, weights and KV cache want about {wanted / _GIB:.1f} GiB",
            "the CPU engine is for small models; use GPUs, or a smaller quantisation",
        )
    return Check("memory", "ok", f"{free / _GIB:.1f} GiB free")


def _cgroup_free() -> int:
    """Bytes below the container's memory limit; very many where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        return limit - int((folder / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
