"""The doctor's screen, its JSON and its exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from glm5deploy.checks import Check
from glm5deploy.cli.app import app
from glm5deploy.stages import doctor

OK = Check("disk", "ok", "plenty")
WARN = Check("GPU", "warn", "none", "install one")
FAIL = Check("engine", "fail", "vLLM is not installed", "scripts/setup.sh")


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checks: list[Check], *flags: str) -> tuple[int, str]:
    def examine(_: Path, *, collectives: bool, ranks: int | None) -> Iterator[Check]:
        assert (collectives, ranks) == ("--nccl" in flags, 2 if "--tp" in flags else None)
        yield from checks

    monkeypatch.setattr(doctor, "examine", examine)
    result = CliRunner().invoke(app, ["doctor", "--workdir", str(tmp_path), *flags])
    return result.exit_code, result.stdout


def test_the_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(monkeypatch, tmp_path, [OK, WARN, FAIL]) == (
        1,
        "OK    disk    plenty\n"
        "WARN  GPU     none\n"
        "              → install one\n"
        "FAIL  engine  vLLM is not installed\n"
        "              → scripts/setup.sh\n",
    )


def test_a_warning_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, out = run(monkeypatch, tmp_path, [OK, WARN], "--json", "--nccl", "--tp", "2")
    assert code == 0
    assert json.loads(out) == {
        "level": "warn",
        "checks": [
            {"check": "disk", "level": "ok", "found": "plenty", "remedy": ""},
            {"check": "GPU", "level": "warn", "found": "none", "remedy": "install one"},
        ],
    }
