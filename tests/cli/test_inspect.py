from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5deploy.demo.local_hub import LocalHub
from tests.support.cli import glm5deploy
from tests.support.data import SET_A, tiny_glm5
from tests.support.gguf_factory import small_model, write_split

SET = SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL"


def inspected(*args: str | Path, code: int = 0, **environment: str) -> dict[str, Any]:
    done = glm5deploy("inspect", *args, "--json", env=environment)
    assert done.returncode == code, done.stderr + done.stdout
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_a_set_against_its_manifest() -> None:
    models = json.loads((tiny_glm5() / "manifest.json").read_text())["models"]
    for model in models.values():
        path = tiny_glm5() / model["shards"][0]
        facts = inspected(path, "--tensors", *(["--indexer-schedule", "FSFS"] if "B-Q4" in path.name else []))
        assert facts["complete"] is True
        assert (facts["tensors"], len(facts["metadata"])) == (model["tensors"], model["keys_in_first_file"])
        assert [Path(shard).name for shard in model["shards"]] == [file["file"] for file in facts["files"]]
        assert facts["indexer"]["schedule"] == model["index_topk_pattern"]
        assert facts["indexer"]["layers_with_tensors"] == len([n for n in model["indexer_tensors_on_layers"] if n < 4])
        assert sum(role["tensors"] for role in facts["roles"]) == model["tensors"]
        assert sum(role["bytes"] for role in facts["roles"]) == sum(t["bytes"] for t in facts["tensor_table"])
        assert {"attention", "indexer", "experts", "shared experts", "embeddings"} <= {
            r["role"] for r in facts["roles"]
        }
        types = {t["tensor"]: t["type"] for t in facts["tensor_table"]}
        by_layer = [types[f"blk.{n}.attn_output.weight"] for n in range(5)]
        recorded = model["types"]["attn_output"].split("/")
        assert by_layer == recorded * (5 if len(recorded) == 1 else 1)


def test_who_decided_the_schedule() -> None:
    b = tiny_glm5() / "GLM-tiny-B-GGUF"
    assert inspected(SET)["indexer"]["decided_by"] == "context length"
    assert inspected(b / "GLM-tiny-B-Q8_0.gguf")["indexer"]["decided_by"] == "file"
    assert inspected(b / "Q4_K_M", "--indexer-schedule", "FSFS")["indexer"]["decided_by"] == "option"
    open_question = inspected(b / "Q4_K_M")["indexer"]
    assert "does not say which of its 4 layers share" in open_question["problem"]
    assert "schedule" not in open_question


def test_a_remote_set_costs_its_headers_only() -> None:
    with LocalHub() as hub:
        hub.publish("tiny/GLM-tiny-A-GGUF", SET_A / "GLM-tiny-A-GGUF")
        remote = inspected("tiny/GLM-tiny-A-GGUF:UD-Q4_K_XL", HF_ENDPOINT=hub.endpoint)
        assert hub.served["bytes"] <= 4 * (64 << 10), "of 18 MB"
        local = inspected(SET)
        for facts in (remote, local):
            facts.pop("source")
        assert remote.pop("commit") == hub.repositories["tiny/GLM-tiny-A-GGUF"].refs["main"]
        assert remote == local


def test_a_shard_without_its_siblings(tmp_path: Path) -> None:
    shards = write_split(small_model(), tmp_path, [0, 8, 11, 11])
    shards[3].unlink()
    facts = inspected(shards[1], "--tensors", code=1)
    assert facts["complete"] is False
    assert facts["split"] == "shard 2 of 4"
    assert shards[3].name in facts["problem"]
    assert [row["tensor"] for row in facts["tensor_table"]] == [t.name for t in small_model().tensors[:8]]


def test_another_architecture_and_a_whole_key(tmp_path: Path) -> None:
    shards = write_split(small_model(), tmp_path, [0, 8, 11, 11])
    facts = inspected(shards[0], "--key", "tokenizer.ggml.tokens")
    assert facts["metadata"]["tokenizer.ggml.tokens"] == ["a", "", "Ġb", "ü"]
    assert "problem" in facts["indexer"], "not a whole glm-dsa model"
    unknown = glm5deploy("inspect", shards[0], "--key", "no.such.key")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "has no key no.such.key" in unknown.stderr


def test_text_for_people(tmp_path: Path) -> None:
    done = glm5deploy("inspect", SET)
    assert done.returncode == 0
    for words in ("4 shards, all there and of one set", "bits per weight  5.787", "glm-dsa.context_length", "FFFF"):
        assert words in done.stdout
    assert "\x1b" not in done.stdout
    damaged = tmp_path / "x.gguf"
    damaged.write_bytes(b"GGUF" + bytes(100))
    done = glm5deploy("inspect", damaged)
    assert done.returncode == 1
    assert "at offset 4: GGUF version 0 cannot be read" in done.stderr
