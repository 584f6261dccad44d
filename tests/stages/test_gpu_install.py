"""On a GPU: install --tune from end to end, and a server that launches what it measured.

Run there with `pytest -m gpu -s tests/stages`: three minutes or four.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import glm5deploy, serving
from tests.support.data import SET_A
from tests.support.serving import free_port

pytestmark = pytest.mark.gpu


def stage(*args: str | Path) -> dict[str, Any]:
    done = glm5deploy(*args, "--json", timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_install_measures_and_a_server_launches_it(tmp_path: Path) -> None:
    at = ("--workdir", tmp_path)
    stage("patch", "--gguf", SET_A / "GLM-tiny-A-GGUF" / "UD-Q4_K_XL", *at)
    print(stage("install", "--tune", "--tp", "1", *at))
    table = json.loads((tmp_path / ".glm5deploy" / "kernel-table.json").read_text())
    assert table["complete"]
    assert table["request"] == {"heads": 4, "topk": 64, "packed": False, "index_heads": 32}
    log = tmp_path / "compile.jsonl"
    flags = ("--tp", "1", "--port", str(free_port()), "--context", "2048", "--max-seqs", "8", "--gpu-memory", "0.1")
    with serving("serve", *at, *flags, env={"GLM5DEPLOY_COMPILE_LOG": str(log)}) as served:
        print(served.ready)
    told = (tmp_path / "logs" / "serve.log").read_text()
    assert "kernel-table.json: 5 rows measured for" in told
    assert {json.loads(line)["phase"] for line in log.read_text().splitlines()} == {"warm-up"}
