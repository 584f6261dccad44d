"""Starts vLLM over the stack with the flags that `glm5deploy serve` generates, and watches what loading costs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from glm5deploy.server.command import build_command
from glm5deploy.server.model_facts import read_model_facts
from glm5deploy.server.process import end_guarded, start_guarded
from glm5deploy.server.settings import ServeSettings

# What vLLM says, in its releases and on CPU and GPU, when it begins and ends to load weights.
_BEGIN = re.compile(r"(Loading model from scratch|Starting to load model)")
_END = re.compile(r"(Model loading took|glm5_gguf: \d+ dense tensors)")
_OURS = re.compile(r"glm5_gguf: (.*)")
_MILESTONES = re.compile(
    r"(Model loading took .*|JIT kernel warmup finished.*|\d+ kernels compiled.*|Graph capturing finished.*|"
    r"init engine .*|GPU KV cache size.*|Available KV cache.*|Auto-enabling VLLM_USE_BREAKABLE_CUDAGRAPH=1|"
    r"torch.compile took.*|.*JIT compilation during inference.*)"
)

_GRACE = 20  # seconds that a server has to end by itself


@dataclass
class Loading:
    """Memory of the process that loads, bytes: ``base`` when vLLM began to load, ``most`` until it was done.

    ``read`` are bytes that its read calls brought during loading (mapped pages are not among them), ``device`` the
    most that was in use on the GPU meanwhile, by whomever, ``seconds`` from vLLM's first to its last word on loading,
    ``lines`` what our loader said.
    """

    base: int = 0
    most: int = 0
    read: int = 0
    device: int = 0
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def above(self) -> int:
        return self.most - self.base


class Engine:
    """A running server; :meth:`stop` ends its whole session."""

    def __init__(self, process: subprocess.Popen[bytes], settings: ServeSettings, log: Path) -> None:
        self.process, self.settings, self.log = process, settings, log
        self.url = settings.base_url
        self.name = settings.name
        self.loading = Loading()
        self.begun = time.monotonic()
        self.ready_seconds = 0.0

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def has_begun_to_load(self) -> bool:
        return _BEGIN.search(self.log.read_text(errors="replace")) is not None

    def milestones(self) -> list[str]:
        """What vLLM said of its start, and of kernels that were compiled too late."""
        return _MILESTONES.findall(self.log.read_text(errors="replace"))

    def wait(self, seconds: float) -> None:
        """Until it is healthy; RuntimeError with the end of the log when it stops or takes longer."""
        begun = time.monotonic()
        with _Watch(self):
            while time.monotonic() - begun < seconds:
                if self.process.poll() is not None:
                    raise RuntimeError(f"vLLM stopped with {self.process.returncode}\n{self.tail()}")
                try:
                    if httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200:
                        self.ready_seconds = time.monotonic() - self.begun
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.2)
        raise RuntimeError(f"vLLM was not ready within {seconds:.0f} s\n{self.tail()}")

    def stop(self) -> None:
        if self.process.stdin is None:  # no guard: it was to outlive this process
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
        end_guarded(self.process, _GRACE)


def start(
    settings: ServeSettings,
    out: Path,
    environment: Mapping[str, str],
    launcher: Sequence[str] | None = None,
    *,
    outlive: bool = False,
) -> Engine:
    """Start the server in a session of its own; its log is ``out/serve.log``.

    It ends with this process, however that ends, unless it is to ``outlive`` it.
    """
    base = {**os.environ, **environment}
    command = build_command(settings, read_model_facts(settings.model_folder), environment=base, launcher=launcher)
    log = out / "serve.log"
    (out / "command.txt").write_text(command.shell() + "\n")
    with log.open("wb") as file:
        env = {**base, **command.env}
        if outlive:
            process = subprocess.Popen(command.argv, stdout=file, stderr=file, env=env, start_new_session=True)
        else:
            process = start_guarded(command.argv, _GRACE, file, env)
    return Engine(process, settings, log)


class _Watch:
    """Follows the log and the process that loads (the largest below the server) while the engine starts."""

    def __init__(self, engine: Engine, every: float = 0.1) -> None:
        self._engine, self._every = engine, every
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun: dict[int, tuple[int, int]] = {}  # RSS and bytes read of every process when loading began

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        loading, began = self._engine.loading, 0.0
        while not self._done.wait(self._every):
            text = self._engine.log.read_text(errors="replace")
            if not began and _BEGIN.search(text):
                began = time.monotonic()
                self._begun = _memory(self._engine.process.pid)
            if began and not loading.seconds:
                self._sample(loading)
                if _END.search(text):
                    loading.seconds = time.monotonic() - began
            loading.lines = _OURS.findall(text)

    def _sample(self, loading: Loading) -> None:
        loading.device = max(loading.device, device_bytes())
        for pid, (rss, read) in _memory(self._engine.process.pid).items():
            base, before = self._begun.get(pid, (rss, read))
            loading.read = max(loading.read, read - before)
            if rss - base > loading.above:
                loading.base, loading.most = base, rss


def device_bytes() -> int:
    """Bytes in use on the first visible GPU; 0 where there is none."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", first]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return int(found) << 20 if found.isdigit() else 0


def _memory(root: int) -> dict[int, tuple[int, int]]:
    """Resident bytes and bytes read so far of ``root`` and every process below it."""
    found = {}
    try:
        top = psutil.Process(root)
        processes = [top, *top.children(recursive=True)]
    except psutil.Error:
        return {}
    for process in processes:
        try:
            found[process.pid] = (process.memory_info().rss, process.io_counters().read_chars)
        except psutil.Error:
            continue
    return found
