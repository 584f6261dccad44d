"""The README's second command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import glm5deploy


@pytest.mark.engine
def test_the_demo_ends_with_an_answer_and_a_table_of_stages(tmp_path: Path) -> None:
    """Also in a shell that is set up for another hub, offline, behind a proxy, with settings of its own."""
    shell = {
        "HF_HUB_OFFLINE": "1",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HTTP_PROXY": "http://127.0.0.1:9",
        "GLM5DEPLOY_MERGE_MODE": "never",
        "GLM5DEPLOY_WORKDIR": str(tmp_path / "other"),
    }
    done = glm5deploy("demo", "--json", "--workdir", tmp_path / "demo", env=shell, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["answer"].strip()
    assert [s["stage"] for s in result["stages"]] == ["fetch", "merge", "patch", "install", "serve"]
    assert (tmp_path / "demo" / "work" / "merged").is_dir()
    assert not (tmp_path / "other").exists()
