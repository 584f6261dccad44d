"""Texts that hand the server to somebody else's supervision: a systemd unit, a compose file. No secret is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.server.api_key import KEY_VARIABLE

IMAGE = "vllm/vllm-openai:v0.33.0"
ENVIRONMENT_FILE = "/etc/glm5deploy.env"


@dataclass(frozen=True, slots=True)
class Deployment:
    """``arguments`` of ``glm5deploy`` as they were typed in ``directory``; ``key_file`` or ``key_variable`` or neither.

    ``weights`` are folders that are only read; ``gpus`` is how many the server uses.
    """

    program: str
    arguments: tuple[str, ...]
    directory: Path
    workdir: Path
    user: str
    port: int
    gpus: int
    stop_grace: float
    weights: tuple[Path, ...] = ()
    config: Path | None = None
    environment: tuple[tuple[str, str], ...] = ()
    """Settings that were given as variables; none of them is a secret."""
    key_file: Path | None = None
    key_variable: bool = False


def systemd_unit(deployment: Deployment) -> str:
    """A unit for the system's manager; save it as /etc/systemd/system/glm5deploy.service."""
    command = " ".join(_systemd_word(word) for word in (deployment.program, *deployment.arguments))
    key = (
        [f"# {KEY_VARIABLE}=… stands in this file, which only root can read.", f"EnvironmentFile={ENVIRONMENT_FILE}"]
        if deployment.key_variable
        else []
    )
    return "\n".join(
        [
            "[Unit]",
            "Description=GLM-5 on vLLM (glm5deploy)",
            "After=network-online.target nvidia-persistenced.service",
            "Wants=network-online.target",
            "",
            "[Service]",
            "Type=exec",
            f"User={deployment.user}",
            f"WorkingDirectory={_systemd_path(deployment.directory)}",
            *(f"Environment={_systemd_word(f'{name}={value}')}" for name, value in deployment.environment),
            *key,
            f"ExecStart={command}",
            "Restart=on-failure",
            "RestartSec=30",
            "# glm5deploy stops the engine's processes itself; what it leaves is killed.",
            "KillMode=mixed",
            f"TimeoutStopSec={deployment.stop_grace + 30:.0f}",
            "TimeoutStartSec=infinity",
            "LimitNOFILE=65536",
            "LimitMEMLOCK=infinity",
            "NoNewPrivileges=true",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def compose_file(deployment: Deployment, source: Path | str) -> str:
    """A compose file; ``source`` is this program for pip: a folder with its sources, or a requirement.

    The port is published on loopback alone.
    """
    mounts = [f"{deployment.workdir}:{deployment.workdir}"]
    mounts += [f"{path}:{path}:ro" for path in deployment.weights if not path.is_relative_to(deployment.workdir)]
    if deployment.config is not None and not deployment.config.is_relative_to(deployment.workdir):
        mounts.append(f"{deployment.config}:{deployment.config}:ro")
    arguments = [*deployment.arguments]
    service: dict[str, object] = {
        "build": _build(source),
        "entrypoint": ["glm5deploy"],
        "working_dir": str(deployment.directory),
        "volumes": mounts,
        "ports": [f"127.0.0.1:{deployment.port}:{deployment.port}"],
        "environment": [
            f"VLLM_CACHE_ROOT={deployment.workdir}/cache/vllm",  # compiled code outlives the container
            f"TRITON_CACHE_DIR={deployment.workdir}/cache/triton",
            *(f"{name}={value}" for name, value in deployment.environment),
            # Taken over from the caller's environment.
            *([KEY_VARIABLE] if deployment.key_variable and deployment.key_file is None else []),
        ],
        "ipc": "host",
        "ulimits": {"memlock": -1, "nofile": 65536},
        "restart": "unless-stopped",
        "stop_grace_period": f"{deployment.stop_grace + 30:.0f}s",
        "healthcheck": {
            "test": ["CMD", "curl", "-fsS", f"http://127.0.0.1:{deployment.port}/health"],
            "interval": "30s",
            "timeout": "10s",
            "start_period": "1h",
        },
        "deploy": {
            "resources": {
                "reservations": {"devices": [{"driver": "nvidia", "count": deployment.gpus, "capabilities": ["gpu"]}]}
            }
        },
    }
    document: dict[str, object] = {"services": {"glm5": service}}
    if deployment.key_file is not None:
        # The secret's path in the container replaces the file's: the last flag of a name counts.
        service["secrets"] = ["glm5_api_key"]
        arguments = _before_dashes(arguments, ["--api-key-file", "/run/secrets/glm5_api_key"])
        document["secrets"] = {"glm5_api_key": {"file": str(deployment.directory / deployment.key_file)}}
    service["command"] = _before_dashes(arguments, ["--host", "0.0.0.0"])
    return "\n".join([*_yaml(document, 0), ""])


def _build(source: Path | str) -> dict[str, object]:
    if isinstance(source, str):
        return {"dockerfile_inline": f"FROM {IMAGE}\nRUN pip install --no-cache-dir {json.dumps(source)}\n"}
    install = f"FROM {IMAGE}\nCOPY pyproject.toml README.md /src/\nCOPY glm5deploy /src/glm5deploy\n"
    return {"context": str(source), "dockerfile_inline": f"{install}RUN pip install --no-cache-dir /src\n"}


def _before_dashes(arguments: Sequence[str], added: Sequence[str]) -> list[str]:
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return [*arguments[:at], *added, *arguments[at:]]


def _yaml(value: object, depth: int) -> list[str]:
    """Block style with JSON scalars, which YAML reads as they are; ``$`` is doubled for compose."""
    pad = "  " * depth
    lines = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (dict, list)):
                lines += [f"{pad}{key}:", *_yaml(item, depth + 1)]
            else:
                lines.append(f"{pad}{key}: {_scalar(item)}")
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                first, *rest = _yaml(item, depth + 1)
                lines += [f"{pad}- {first.lstrip()}", *rest]
            else:
                lines.append(f"{pad}- {_scalar(item)}")
    return lines


def _scalar(value: object) -> str:
    return json.dumps(value.replace("$", "$$") if isinstance(value, str) else value, ensure_ascii=False)


def _systemd_path(path: Path) -> str:
    return str(path).replace("%", "%%")


def _systemd_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[\w@%+=:,./-]+", word) else f'"{escaped}"'
