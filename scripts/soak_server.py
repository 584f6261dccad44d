"""The server of scripts/soak.py where it starts one itself: longer prompts than a test's, a cache too small for all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from layer_stack import engine as engines
from layer_stack.place import free_port, quick_folder

from glm5deploy.server.settings import Device, ServeSettings

START_SECONDS = 480.0  # other servers may start beside it
CONTEXT = {"cuda": 8192, "cpu": 2048}
CACHE_TOKENS = {"cuda": 20_480, "cpu": 4096}
# The cache's size is given in bytes too: profiling it would count what others allocate on the GPU meanwhile.
_GPU = ("--kv-cache-memory-bytes", str(2 << 30), "--gpu-memory-utilization", "0.02", "--disable-flashinfer-autotune")
_BLOCK = 64


@contextmanager
def running(gguf: Path, out: Path, device: Device) -> Iterator[engines.Engine]:
    """A server over a GGUF set that answers; its log, command and compile log (``compile.jsonl``) are in ``out``.

    RuntimeError with the end of its log when it does not start.
    """
    out.mkdir(parents=True, exist_ok=True)
    blocks = CACHE_TOKENS[device] // _BLOCK
    flags = ("--num-gpu-blocks-override", str(blocks), "--no-enable-log-requests", *(_GPU if device == "cuda" else ()))
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        settings = ServeSettings(
            model_folder=quick_folder(gguf, Path(work) / "model"),
            device=device,
            port=free_port(),
            name="soak",
            context=CONTEXT[device],
            dtype="float32" if device == "cpu" else "bfloat16",
            max_seqs=32,
            extra=flags,
        )
        environment = {"GLM5DEPLOY_COMPILE_LOG": str((out / "compile.jsonl").resolve())}
        served = engines.start(settings, out, environment)
        try:
            served.wait(START_SECONDS)
            yield served
        finally:
            served.stop()
