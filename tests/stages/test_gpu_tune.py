"""On a GPU: launch parameters are measured, taken, and with them nothing compiles after warm-up.

Run there with `pytest -m gpu -s tests/stages`: a minute or two for each cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


def run(*words: str, **environment: str) -> list[dict[str, Any]]:
    command: Sequence[str] = [sys.executable, "-W", "ignore", "-m", *words]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=350, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("packed", [(), ("--packed",)], ids=["plain", "packed"])
def test_measured_parameters_serve_without_compiling(packed: tuple[str, ...], tmp_path: Path) -> None:
    table, log = tmp_path / "table.json", tmp_path / "log"
    measure = ("glm5deploy.kernels.tune", "--heads", "8", "--out", str(table), *packed)
    *notes, last = run(*measure, "--seconds", "300")
    print("\n".join(line["note"] for line in notes))
    assert last["complete"]
    assert len(run(*measure)) == 1, "what is there is not measured again"
    environment = {"GLM5DEPLOY_KERNEL_TABLE": str(table), "GLM5DEPLOY_COMPILE_LOG": str(log)}
    (found,) = run("tests.kernels.storm", *packed, **environment)
    assert found["rows"] == 5
    assert found["prepared"] > 20
    assert found["steps"] > 100
    assert found["late"] == []
    assert {json.loads(line)["phase"] for line in log.read_text().splitlines()} == {"warm-up"}
