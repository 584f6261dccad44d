"""Pipeline stages of a model whose layers share indexers: the command divides them rightly or refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.glm_dsa.indexer_schedule import glm_5_2_pattern
from glm5deploy.server.command import build_command
from glm5deploy.server.model_facts import read_model_facts
from tests.support.serving import facts, settings, write_model_folder

VARIABLE = "VLLM_PP_LAYER_PARTITION"
SHARED = facts(index_topk_pattern=glm_5_2_pattern())


def test_stages_are_named_where_vllm_would_divide_wrongly() -> None:
    command = build_command(settings(device="cuda", tp=8, pp=2), SHARED, launcher=("vllm", "serve"))
    assert command.env[VARIABLE] == "38,40"
    assert "its own indexer" in command.reasons[VARIABLE]


@pytest.mark.parametrize(("pattern", "pp"), [("F" * 78, 2), (glm_5_2_pattern(), 1), ("", 2)])
def test_nothing_is_named_where_vllm_divides_rightly(pattern: str, pp: int) -> None:
    command = build_command(settings(device="cuda", pp=pp), facts(index_topk_pattern=pattern), launcher=("vllm",))
    assert VARIABLE not in command.env


def test_a_users_own_division_is_kept_when_right() -> None:
    command = build_command(settings(device="cuda", pp=2), SHARED, environment={VARIABLE: "42,36"}, launcher=("v",))
    assert VARIABLE not in command.env


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("39,39", "stage 1 would begin with a layer that shares"),
        ("40,40", "2 numbers that add up to 78"),
        ("38", "2 numbers that add up to 78"),
        ("38,x", "2 numbers that add up to 78"),
    ],
)
def test_a_users_wrong_division_is_refused(value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        build_command(settings(device="cuda", pp=2), SHARED, environment={VARIABLE: value}, launcher=("v",))
    assert caught.value.hint == "unset it: 38,40"


def test_the_schedule_comes_from_the_model_folder(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "m", weights=tmp_path / "w.gguf", config={"index_topk_pattern": "FSFS"})
    assert read_model_facts(folder).index_topk_pattern == "FSFS"
    config = json.loads((folder / "config.json").read_text()) | {"index_topk_pattern": "FXFS"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(FileFormatError, match="index_topk_pattern is 'FXFS'"):
        read_model_facts(folder)
