"""What a user decides about a server, as one value that cannot be contradictory."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glm5deploy.errors import UsageError

Device = Literal["cpu", "cuda"]
Attention = Literal["triton", "native"]
STOP_GRACE = 20.0  # seconds from SIGTERM to SIGKILL

# Flags that the program itself needs to know (it asks the server at this address, under this name) or that would undo
# a promise of it (no remote code, no secret on a command line).
OWN_FLAGS: dict[str, str] = {
    "--host": "use --host of glm5deploy serve",
    "--port": "use --port of glm5deploy serve",
    "--uds": "the server is asked over TCP; use --host and --port",
    "--served-model-name": "use --name of glm5deploy serve",
    "--tensor-parallel-size": "use --tp of glm5deploy serve",
    "-tp": "use --tp of glm5deploy serve",
    "--load-format": "the weights are GGUF and only glm5_gguf reads them",
    "--quantization": "the quantisation is what the GGUF file says",
    "-q": "the quantisation is what the GGUF file says",
    "--api-key": "a key on a command line is visible to everyone who runs ps: use --api-key-file or GLM5DEPLOY_API_KEY",
    "--trust-remote-code": "code from a model folder is never run",
    "--model": "the model folder is what the patch stage built",
}


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything from which the command of a server follows.

    ``context`` is in tokens (None: what the model says), ``cpu_kv_gib`` in GiB, ``ready_timeout``, ``stop_grace`` and
    ``stall_seconds`` in seconds. ``reasoning_parser`` and ``tool_parser`` are a name of vLLM's registries, ``"auto"``
    or ``"none"``.
    ``mtp`` is the number of draft tokens a step, 0 for none. ``extra`` is handed to vLLM as it is.
    """

    model_folder: Path
    device: Device
    tp: int = 1
    pp: int = 1
    machines: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "glm-5"
    context: int | None = None
    dtype: str = "auto"
    kv_dtype: str = "auto"
    attention: Attention = "triton"
    reasoning_parser: str = "auto"
    tool_parser: str = "auto"
    max_seqs: int | None = None
    mtp: int = 0
    expert_parallel: bool = False
    gpu_memory: float | None = None
    custom_all_reduce: bool = True
    cpu_kv_gib: int = 1
    cpu_cores: tuple[int, ...] = ()
    ready_timeout: float = 600.0
    stop_grace: float = STOP_GRACE
    stall_seconds: float = 300.0
    cache_dir: Path | None = None
    kernel_table: Path | None = None
    api_key_protected: bool = False
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value, least in (("tp", self.tp, 1), ("pp", self.pp, 1), ("mtp", self.mtp, 0)):
            if value < least:
                raise UsageError(f"--{name} {value}: must be at least {least}")
        if not 1 <= self.port <= 65535:
            raise UsageError(f"--port {self.port}: a TCP port lies between 1 and 65535")
        if self.context is not None and self.context < 1:
            raise UsageError(f"--context {self.context}: must be a positive number of tokens")
        if self.max_seqs is not None and self.max_seqs < 1:
            raise UsageError(f"--max-seqs {self.max_seqs}: must be at least 1")
        if self.gpu_memory is not None and not 0 < self.gpu_memory <= 1:
            raise UsageError(f"--gpu-memory {self.gpu_memory}: the fraction lies above 0 and at most at 1")
        if self.device == "cpu" and self.cpu_kv_gib < 1:
            raise UsageError(f"cpu_kv_gib {self.cpu_kv_gib}: vLLM counts the CPU's KV cache in whole GiB, at least 1")
        if min(self.ready_timeout, self.stop_grace, self.stall_seconds) <= 0:
            raise UsageError("time limits for ready, stop and stall must be positive seconds")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", self.name):
            raise UsageError(
                f"served model name {self.name!r}: letters, digits and . _ / : - only, at most 128, "
                "beginning with a letter or digit"
            )
        _check_host(self.host)
        _check_extra(self.extra)

    @property
    def local_ranks(self) -> int:
        """Ranks that run on this machine; with several machines each runs as many."""
        return self.tp * self.pp // self.machines

    @property
    def loopback_only(self) -> bool:
        """Whether nothing outside this machine can reach the server."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback

    @property
    def base_url(self) -> str:
        """Where a client on this machine reaches the server (an any-address is reached through loopback)."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def _check_host(host: str) -> None:
    if host == "localhost":
        return
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise UsageError(
            f"--host {host!r} is not an IP address",
            hint="127.0.0.1 serves this machine only, 0.0.0.0 everyone who can reach it",
        ) from None


def _check_extra(extra: tuple[str, ...]) -> None:
    for word in extra:
        flag = flag_name(word)
        if flag in OWN_FLAGS:
            raise UsageError(f"{flag} cannot be given after --", hint=OWN_FLAGS[flag])
        if flag == "--no-trust-remote-code":
            continue
        if "\0" in word:
            raise UsageError("a vLLM flag contains a NUL character")


def flag_name(word: str) -> str:
    """``--max_model_len=8`` → ``--max-model-len``: the flag as vLLM spells it, or "" for a word that is no flag."""
    if not word.startswith("-") or not word.lstrip("-") or word.lstrip("-")[0].isdigit():
        return ""
    return word.split("=", 1)[0].replace("_", "-")
