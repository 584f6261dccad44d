from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from glm5deploy.demo.local_hub import LocalHub
from glm5deploy.errors import DeployError
from glm5deploy.stages import doctor
from glm5deploy.stages.doctor import check_disk, check_engine, check_hub, check_python, examine


def test_python() -> None:
    assert check_python().level == "ok"


def test_a_probe_that_fails_is_a_failed_check_with_its_hint() -> None:
    def probe() -> dict[str, object]:
        raise DeployError("vllm.x:Y is missing", hint="install vLLM 0.33")

    check = check_engine(probe)
    assert check.level == "fail"
    assert check.found.startswith("vllm.x:Y is missing (")
    assert check.remedy == "install vLLM 0.33"


def test_a_probe_that_holds_names_versions_and_backend() -> None:
    check = check_engine(lambda: {"ok": True, "checks": {"backend": "GLM5_TRITON_SPARSE"}})
    assert check.level == "ok"
    assert "torch " in check.found
    assert check.found.endswith("plugin registered, backend GLM5_TRITON_SPARSE")


def test_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_versions", dict)
    assert check_engine(dict).remedy == "scripts/setup.sh installs a supported engine"


def test_disk(tmp_path: Path) -> None:
    check = check_disk(tmp_path / "not" / "there" / "yet")
    assert check.found.startswith(f"{tmp_path}: ")
    assert re.search(r" [\d.]+ [MGT]B free, writes [\d.]+ [kMG]B/s$", check.found)
    assert list(tmp_path.iterdir()) == []


def test_hub(tmp_path: Path) -> None:
    with LocalHub() as hub:
        check = check_hub(hub.endpoint)
        assert check.level == "ok"
        assert check.found == f"{hub.endpoint} answers, without a token (public repositories only)"
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        check = check_hub(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert (check.level, check.found.endswith("Connection refused")) == ("warn", True)
    assert check_hub("no address").level == "warn"


def test_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    checks = {check.name: check for check in examine(tmp_path, collectives=True, ranks=1, probe=lambda: {"ok": True})}
    assert list(checks) == ["Python", "GPU", "engine", "disk", "shared memory", "open files", "hub", "all-reduce"]
    assert checks["engine"].level == "ok"
    assert checks["hub"].level == "warn"
    if not Path("/proc/driver/nvidia").exists():
        assert checks["GPU"].level == "warn"
