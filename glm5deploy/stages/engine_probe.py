"""Asks the engine's side, in a child process, what the command line's side must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from glm5deploy.errors import DeployError

TIMEOUT_SECONDS = 600.0
"""Importing vLLM takes 10 to 60 s from a cold disk; compiling kernels for a check takes more."""


def probe_engine(*flags: str, env: Mapping[str, str] | None = None) -> dict[str, object]:
    """The report of ``python -m glm5deploy.vllm_plugin.probe --json FLAGS``.

    Keys: ``ok``, ``problems`` (each with ``symbol``, ``message``, ``hint``), ``versions``, ``device``, ``checks``.

    :raises DeployError: vLLM is missing or of an unsupported version, or a part of the plugin does not resolve.
    """
    command = [sys.executable, "-m", "glm5deploy.vllm_plugin.probe", "--json", *flags]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, env={**os.environ, **(env or {})}
        )
    except subprocess.TimeoutExpired:
        raise DeployError(
            f"the engine probe did not answer within {TIMEOUT_SECONDS:.0f} s", hint=f"run it by hand: {_shell(command)}"
        ) from None
    report = _last_json_object(child.stdout)
    if report is None:
        told = child.stderr.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise DeployError(f"the engine probe failed: {told[0]}", hint=f"run it by hand: {_shell(command)}")
    problems = report.get("problems")
    if not report.get("ok") and isinstance(problems, list):
        first = problems[0] if problems and isinstance(problems[0], dict) else {}
        message = "; ".join(str(p.get("message")) for p in problems if isinstance(p, dict)) or "unknown problem"
        raise DeployError(message, hint=str(first.get("hint") or "scripts/setup.sh installs a supported engine"))
    return report


def _last_json_object(text: str) -> dict[str, object] | None:
    """Libraries may print above the report, so the last line that is an object counts."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                value = json.loads(line)
            except ValueError:
                return None
            return value if isinstance(value, dict) else None
    return None


def _shell(command: list[str]) -> str:
    return " ".join(command)
