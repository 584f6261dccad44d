"""What is kept of a server that hung or died: stacks, the log's end, GPU state. Nothing of any prompt."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from glm5deploy.server.diagnosis import find_faults, read_tail

KEPT = 10
_LINES = 400
_DUMP_SECONDS = 20
# vLLM's debug and error output may quote requests under these names.
_PRIVATE = re.compile(r"prompt|messages?['\"]?\s*[:=]|content['\"]?\s*[:=]|token_ids|Received request", re.IGNORECASE)


def save_incident(folder: Path, reason: str, log: Path, pids: Sequence[int], gpu_state: str) -> Path:
    """Write one incident's folder under ``folder`` and return it; the oldest past KEPT are removed.

    ``pids`` are the server's processes that still live, ``gpu_state`` is a text about the GPUs.
    """
    place = folder / datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    place.mkdir(parents=True)
    lines = public_lines(read_tail(log))[-_LINES:]
    kernel = kernel_messages()
    faults = [{"name": f.name, "line": line, "remedy": f.remedy} for f, line in find_faults([*lines, *kernel])]
    (place / "reason.json").write_text(json.dumps({"reason": reason, "faults": faults}, indent=1))
    (place / "log.txt").write_text("\n".join(lines))
    (place / "kernel.txt").write_text("\n".join(kernel))
    (place / "gpus.txt").write_text(gpu_state)
    (place / "stacks.txt").write_text("\n\n".join(stack_of(pid) for pid in pids))
    for old in sorted(path for path in folder.iterdir() if path.is_dir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return place


def explain(place: Path) -> list[str]:
    """The known faults of an incident as sentences: name, line, remedy."""
    faults = json.loads((place / "reason.json").read_text())["faults"]
    return [f"{fault['name']}: {fault['line'][:200]} ({fault['remedy']})" for fault in faults]


def public_lines(lines: Sequence[str]) -> list[str]:
    """``lines`` without those that might quote a request."""
    return ["[left out: may quote a request]" if _PRIVATE.search(line) else line for line in lines]


def kernel_messages() -> list[str]:
    """What the kernel says of GPUs and killed processes; empty where it may not be read."""
    text = _output(["dmesg"], 10)
    return [line for line in text.splitlines() if re.search(r"NVRM|Xid|Out of memory|oom-kill", line)][-50:]


def stack_of(pid: int) -> str:
    """The Python stack of a process by py-spy (without values), else what /proc says it waits for."""
    head = f"process {pid}: {_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ').strip()[:200]}"
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    stack = _output([spy, "dump", "--nonblocking", "--pid", str(pid)], _DUMP_SECONDS) if spy else ""
    if not stack:
        state = re.search(r"^State:.*$", _read(f"/proc/{pid}/status"), re.MULTILINE)
        stack = f"{state.group() if state else 'gone'}\nwaits in {_read(f'/proc/{pid}/wchan') or 'unknown'}"
        stack += f"\n{_read(f'/proc/{pid}/stack')}"
    return f"{head}\n{stack}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _output(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
