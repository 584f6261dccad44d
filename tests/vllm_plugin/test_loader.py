"""What the loader asks of its settings, and what each kind of model loads from one file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.config.load import LoadConfig

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.tensor_names import TensorPlan
from glm5deploy.vllm_plugin.loader import Glm5GgufLoader, draft_placements, main_placements
from glm5deploy.vllm_plugin.model_files import ModelFiles
from tests.vllm_plugin.conftest import Run

Folder = Callable[[Run], Path]


def plan(folder: Path, *, use_mtp: bool = False) -> TensorPlan:
    files = ModelFiles.open(folder)
    return files.plan(files.pattern, use_mtp=use_mtp)


@pytest.mark.parametrize("extra", [{}, {"weights": "auto"}, {"weights": "dense"}, {"weights": "quantised"}])
def test_settings_that_are_understood(extra: dict[str, Any]) -> None:
    Glm5GgufLoader(LoadConfig(load_format="glm5_gguf", model_loader_extra_config=extra))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"weights": "packed"}, "weights 'packed': say one of auto, dense, quantised"),
        ({"threads": 4}, "knows no --model-loader-extra-config threads"),
    ],
)
def test_settings_that_are_not(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Glm5GgufLoader(LoadConfig(load_format="glm5_gguf", model_loader_extra_config=extra))


def test_a_pipeline_stage_loads_its_layers_and_the_globals(model_folder: Folder) -> None:
    whole = plan(model_folder(Run("A")))
    stages = [main_placements(whole, range(2)), main_placements(whole, range(2, 4))]
    assert {p.layer for p in stages[0]} == {None, 0, 1}
    assert {p.layer for p in stages[1]} == {None, 2, 3}
    assert sum(len(stage) for stage in stages) == len(whole.used) + 3


def test_a_tied_embedding_is_the_output_matrix_too(model_folder: Folder) -> None:
    whole = plan(model_folder(Run("A")))
    without_head = tuple(p for p in whole.used if p.name != "output.weight")
    tied = main_placements(dataclasses.replace(whole, used=without_head, tied_embeddings=True), range(4))
    assert [p.name for p in tied if p.hf_name == "lm_head.weight"] == ["token_embd.weight"]


def test_the_draft_model_loads_the_mtp_block_and_shares_embedding_and_head(model_folder: Folder) -> None:
    placements = draft_placements(plan(model_folder(Run("A")), use_mtp=True), num_layers=4)
    names = {p.hf_name: p.name for p in placements}
    assert len(names) == len(placements) - 1, "the halves of kv_b have one name, all others are different"
    assert all(name.startswith("model.layers.4.") for name in names)
    assert names["model.layers.4.embed_tokens.weight"] == "token_embd.weight"
    assert names["model.layers.4.shared_head.head.weight"] == "output.weight"
    assert {f"model.layers.4.{n}.weight" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm")} <= set(names)
    assert "model.layers.4.self_attn.indexer.wq_b.weight" in names


def test_a_draft_model_without_an_mtp_block_is_refused(model_folder: Folder) -> None:
    files = ModelFiles.open(model_folder(Run("A")))
    stripped = dataclasses.replace(files, hparams=dataclasses.replace(files.hparams, num_nextn=0))
    with pytest.raises(UsageError, match="no MTP block"):
        stripped.plan(files.pattern, use_mtp=True)
