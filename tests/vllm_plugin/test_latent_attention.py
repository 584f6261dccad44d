"""Fused operations before attention: the layer with them, interpreted, and what decides whether they are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from glm5deploy.vllm_plugin import replaced
from glm5deploy.vllm_plugin.engine_config import FUSIONS, chained, fusion, reaches
from tests.vllm_plugin.conftest import Run


@pytest.fixture(scope="module")
def report(model_folder: Callable[[Run], Path]) -> Any:
    return interpreted("interpreted_layer", model_folder(Run("B-Q8")))


@pytest.fixture(scope="module")
def queries(model_folder: Callable[[Run], Path]) -> Any:
    """Both weights that multiply a query's latents are of one type in the first set, of two in the second."""
    return interpreted("interpreted_queries", model_folder(Run("B-Q8")), model_folder(Run("A")))


def interpreted(module: str, *folders: Path) -> Any:
    command = [sys.executable, "-m", f"tests.support.{module}", *map(str, folders)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_a_fused_layer_computes_stores_and_selects_what_vllms_own_does(report: Any) -> None:
    """A layer with an indexer and one that shares its selection; prompts and decoding, both with padding."""
    records = report["layers"]
    assert [record["fusion"] for record in records] == [*FUSIONS[1:], *FUSIONS[1:]]
    for record in records:
        assert record["launched"] == launches(record), record
        assert record["outputs"] <= 2e-6, record
        assert record["cache"] <= 1e-6, record
        assert record["selected"] == 0, record
        assert record["profiled"], record


def launches(record: Any) -> dict[str, int]:
    """Of two steps; products of the prompts, which are many rows, are left to cuBLAS."""
    expected = {"latents": 2}
    if reaches(record["fusion"], "query"):
        expected["queries"] = 2
    if reaches(record["fusion"], "experts"):
        expected |= {"values": 1, "looked up": 2} | ({"index": 2, "product": 1} if record["indexer"] else {})
    return expected


@pytest.mark.slow
def test_queries_and_index_queries_of_few_tokens_are_one_product(queries: Any) -> None:
    steps = queries["steps"]
    assert [step["types"] for step in steps] == [["Q8_0", "Q8_0"]] * 4 + [["Q6_K", "Q5_K"]] * 4
    assert [step["tokens"] for step in steps] == [1, 3, 16, 17] * 2
    for step in steps:
        assert step["launched"] == int(step["tokens"] <= 16), step
        assert step["tokens"] == 1 or step["strides"] == [0, 0], step
        assert step["outputs"] <= 2e-6, step
        assert step["cache"] <= 1e-6, step
        assert step["selected"] == 0, step


@pytest.mark.slow
def test_layers_of_other_kinds_multiply_apart(queries: Any) -> None:
    assert queries["paired"] == [True] + [False] * 6


def test_cache_rows_are_looked_up_once_for_a_selection(report: Any) -> None:
    """Two steps, each of a layer with a selection and one that shares it and has metadata of its own."""
    assert report["resolved"] == 2


def test_layers_compile_into_one_graph(report: Any) -> None:
    """vLLM's own operations in our layer, and every way to fuse them."""
    assert report["compiled"] == [True] * len(FUSIONS)


def test_layers_are_fused_where_they_are_the_known_ones(report: Any) -> None:
    assert report["built"] == ["off", "off"], "the CPU engine stays with vLLM's own layer"
    known, *changed = report["obstacles"]
    assert known is None
    assert changed == [
        "the layer's projections are others",
        "RoPE is of another kind",
        "norms are of another kind",
        "attention runs on another backend",
    ]


def test_norms_between_parts_are_vllms(report: Any) -> None:
    """Prompts are more rows than the kernel takes; a step has two norms a layer and one behind the last."""
    norms = report["norms"]
    assert not norms["built"], "the CPU engine stays with vLLM's own norms"
    assert norms["launched"] == [0, 2 * norms["layers"] + 1]
    assert norms["error"] <= 2e-6
    known, *changed = norms["obstacles"]
    assert known is None
    assert changed == ["norms are of another kind"] * 2 + ["vLLM computes them with other kernels"]


def test_code_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.layernorm import RMSNorm

    replaced.unknown.cache_clear()
    assert replaced.unknown() == ()
    monkeypatch.setattr(RMSNorm, "forward_cuda", RMSNorm.forward_native)
    replaced.unknown.cache_clear()
    assert replaced.unknown() == ("RMSNorm.forward_cuda",)
    monkeypatch.undo()
    replaced.unknown.cache_clear()


@pytest.mark.parametrize(
    ("settings", "chosen"), [({}, "experts"), ({"glm5_fusion": "off"}, "off"), (object(), "experts")]
)
def test_the_setting(settings: Any, chosen: str) -> None:
    assert fusion(SimpleNamespace(additional_config=settings)) == chosen


@pytest.mark.parametrize(("settings", "chosen"), [({}, True), ({"glm5_chained": False}, False), (object(), True)])
def test_whether_launches_are_chained(settings: Any, chosen: bool) -> None:
    assert chained(SimpleNamespace(additional_config=settings)) is chosen


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="must be true or false, not 'no'"):
        chained(SimpleNamespace(additional_config={"glm5_chained": "no"}))
    with pytest.raises(ValueError, match="must be one of off, latent, query, norms, experts, not 'all'"):
        fusion(SimpleNamespace(additional_config={"glm5_fusion": "all"}))
