"""Launch parameters measured on this machine's GPU: how they come about, and whether a server may use them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.checks import Check
from glm5deploy.config import Config
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.files import changed_file, file_facts, read_json
from glm5deploy.hardware.nvml import read_driver, visible
from glm5deploy.pipeline.stage import Context, Json

NAME = "kernel-table.json"
SECONDS = 300.0
"""What is not measured by then keeps the built-in parameters; another run goes on with it."""
_REMEDY = "glm5deploy install --tune measures again; until then the built-in parameters are used"


@dataclass(frozen=True, slots=True)
class Shape:
    """What launch parameters are measured for: one GPU's attention heads, selected positions, cache, index heads."""

    heads: int
    topk: int
    packed: bool
    index_heads: int

    @property
    def arguments(self) -> tuple[str, ...]:
        numbers = ("--heads", str(self.heads), "--topk", str(self.topk), "--index-heads", str(self.index_heads))
        return (*numbers, "--packed") if self.packed else numbers

    def as_json(self) -> dict[str, object]:
        return {"heads": self.heads, "topk": self.topk, "packed": self.packed, "index_heads": self.index_heads}

    def __str__(self) -> str:
        return f"{self.heads} heads, top {self.topk}, a {_cache(self.packed)}"


def _cache(packed: bool) -> str:
    return "fp8_ds_mla cache" if packed else "16-bit cache"


def wanted_shape(config: Config, folder: Path) -> Shape:
    """From the model folder and the settings: all heads over ``tp`` GPUs, or over those that are here.

    Raises UsageError for heads that cannot be, DeployError for a folder that says nothing about them.
    """
    try:
        model = read_json(folder / "config.json") or {}
    except (OSError, ValueError):
        model = {}
    names = ("num_attention_heads", "index_topk", "index_n_heads")
    heads, topk, index_heads = (value if type(value := model.get(name)) is int else 0 for name in names)
    if min(heads, topk, index_heads) < 1:
        raise DeployError(f"{folder / 'config.json'} is damaged", hint="glm5deploy patch --force rebuilds the folder")
    packed = config.serve.kv_dtype == "fp8_ds_mla"
    own = config.install.heads
    if own:
        if own > heads:
            raise UsageError(f"--heads {own}: the model has {heads}")
        return Shape(own, topk, packed, index_heads)
    tp = config.serve.tp if config.origin("serve.tp") != "default" else _gpus(heads)
    if heads % tp:
        raise UsageError(f"{heads} attention heads cannot be dealt out to {tp} GPUs", hint="say --heads")
    return Shape(heads // tp, topk, packed, index_heads)


def _gpus(heads: int) -> int:
    """The most of the visible GPUs that can share ``heads`` evenly; 1 where none is known."""
    driver = read_driver()
    found = len(visible(driver.gpus, os.environ)) if driver else 0
    return max((count for count in range(1, found + 1) if heads % count == 0), default=1)


def measure(context: Context, shape: Shape, seconds: float = SECONDS) -> Json:
    """Measure in a child process; returns what install records of the table.

    An interruption leaves the table of before, and what was measured is kept for the next run. Raises UsageError where
    there is no GPU, DeployError where kernels are wrong on it.
    """
    table = context.private / NAME
    context.events.note(f"measuring launch parameters for {shape}, at most about {seconds:.0f} s")
    command = [sys.executable, "-m", "glm5deploy.kernels.tune", *shape.arguments, "--seconds", f"{seconds:g}"]
    report: Mapping[str, object] = {}
    with _lines([*command, "--out", str(table)]) as (child, lines, errors):
        for line in lines:
            facts = json.loads(line) if line.startswith("{") else {}
            if "note" in facts:
                context.events.note(f"{facts['done']} of {facts['total']}: {facts['note']}")
            elif facts:
                report = facts
        code = child.wait()
        last_words = errors() or [f"exit status {code}"]
    if "error" in report:
        kind = UsageError if code == UsageError.exit_code else DeployError
        raise kind(str(report["error"]), hint=str(report.get("hint") or "leave --tune out"))
    if code or "table" not in report:
        raise DeployError(
            f"measuring launch parameters failed: {last_words[-1]}",
            hint="leave --tune out; the built-in parameters are then used",
        )
    if not report.get("complete"):
        context.events.warning(f"the time was up before all was measured; {_REMEDY}")
    return {**file_facts(table), "sha256": _digest(table), "request": report["request"], "made_for": report["made_for"]}


@contextlib.contextmanager
def _lines(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], Iterator[str], Callable[[], list[str]]]]:
    """A child, its lines, and what gives its last words on stderr; it does not outlive the context."""
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, start_new_session=True)

        def errors() -> list[str]:
            words.seek(0)
            return words.read().strip().splitlines()[-1:]

        try:
            assert child.stdout is not None
            yield child, iter(child.stdout), errors
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stale_table(outputs: Mapping[str, object], wanted: Shape | None) -> list[str]:
    """Why install has to run again for its table's sake; ``wanted`` is what to measure for, where that is asked for."""
    table = outputs.get("kernel_table")
    if not isinstance(table, Mapping):
        return ["launch parameters have not been measured"] if wanted else []
    if wanted and table.get("request") != wanted.as_json():
        return [f"launch parameters have not been measured for {wanted}"]
    reason = changed_file(table)
    return [reason] if reason else []


def usable_table(install: Mapping[str, object], heads: int, packed: bool) -> tuple[Path | None, list[Check]]:
    """The table that a server may use, and what there is to say about it; nothing where none was measured.

    ``heads`` are those of one GPU, ``packed`` an fp8_ds_mla cache. Whether GPU and versions are the table's own, each
    rank looks itself.
    """
    table = install.get("kernel_table")
    if not isinstance(table, Mapping):
        return None, []
    path = Path(str(table.get("path")))
    if not path.is_file() or _digest(path) != table.get("sha256"):
        why = "was changed" if path.is_file() else "is missing"
        return None, [Check("kernel table", "warn", f"{path} {why} since it was measured", _REMEDY)]
    request = table.get("request")
    request = request if isinstance(request, Mapping) else {}
    if (request.get("heads"), request.get("packed")) != (heads, packed):
        measured = f"{request.get('heads')} heads and a {_cache(bool(request.get('packed')))}"
        found = f"{path} was measured for {measured}, not for {heads} and a {_cache(packed)}"
        remedy = "attention takes the built-in parameters; glm5deploy install --tune measures for these settings"
        return path, [Check("kernel table", "warn", found, remedy)]
    return path, [Check("kernel table", "ok", f"{path}, measured on {_gpu(table)}")]


def _gpu(table: Mapping[str, object]) -> str:
    made_for = table.get("made_for")
    return str(made_for.get("name") or "this GPU") if isinstance(made_for, Mapping) else "this GPU"
