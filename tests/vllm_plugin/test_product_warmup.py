"""Warm-up launches every variant of the products that a step of any size launches, by Triton's own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compared() -> dict[str, list[str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.vllm_plugin.product_keys"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_no_step_launches_what_warm_up_did_not() -> None:
    found = compared()
    assert found["missing"] == []
    assert found["noticed"], "a launch that warm-up leaves out must show"
    assert all("glm5deploy.quants.moe_kernel" in line for line in found["noticed"])
