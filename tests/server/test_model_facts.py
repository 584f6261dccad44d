from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glm5deploy.errors import DeployError
from glm5deploy.server.model_facts import ModelFacts, read_model_facts
from tests.support.serving import GLM_TOKENS, write_model_folder


def test_facts_of_a_folder(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    facts = read_model_facts(write_model_folder(tmp_path / "model", weights=weights))
    assert facts == ModelFacts(64, 202752, 4, 256, 1, frozenset(GLM_TOKENS), ((weights, 100),))
    assert facts.is_test_model
    assert facts.weight_bytes == 100


def test_a_missing_folder_names_the_stage_that_builds_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="does not exist") as caught:
        read_model_facts(tmp_path / "none")
    assert caught.value.hint == "glm5deploy patch builds it"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "is missing"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[" * 100_000, "is not JSON"),
        ("config.json", "[]", "holds no JSON object"),
        ("config.json", json.dumps({"model_type": "llama"}), "model_type is 'llama'"),
        ("glm5_gguf.json", json.dumps({"files": [], "sizes": []}), "files and sizes"),
        ("glm5_gguf.json", json.dumps({"files": ["w.gguf"], "sizes": [100]}), "files and sizes"),
        ("glm5_gguf.json", json.dumps({"files": ["/w.gguf"], "sizes": [True]}), "files and sizes"),
        ("glm5_gguf.json", json.dumps({"files": ["/w.gguf"], "sizes": [1, 2]}), "files and sizes"),
        ("glm5_gguf.json", json.dumps({"files": ["/nowhere/w.gguf"], "sizes": [1]}), "/nowhere/w.gguf is missing"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = write_model_folder(tmp_path / "model", weights=tmp_path / "w.gguf")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(DeployError, match=message) as caught:
        read_model_facts(folder)
    assert caught.value.hint


@pytest.mark.parametrize("value", [0, -1, "64", True, None, 1.5])
def test_a_number_must_be_one(tmp_path: Path, value: Any) -> None:
    folder = write_model_folder(tmp_path / "m", weights=tmp_path / "w.gguf", config={"index_topk": value})
    with pytest.raises(DeployError, match="index_topk is"):
        read_model_facts(folder)


def test_a_weight_file_of_another_size(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", weights=tmp_path / "w.gguf")
    (tmp_path / "w.gguf").write_bytes(b"short")
    with pytest.raises(DeployError, match="has 5 bytes, the patch stage saw 100"):
        read_model_facts(folder)
