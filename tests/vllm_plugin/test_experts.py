"""Routed experts with fewer launches: the layer with them, interpreted, and what decides whether they are used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm5deploy.vllm_plugin import replaced
from glm5deploy.vllm_plugin.engine_config import DEFAULT_FUSION, FUSIONS, reaches
from tests.vllm_plugin.conftest import Run


@pytest.fixture(scope="module")
def report(model_folder: Callable[[Run], Path]) -> Any:
    folder = model_folder(Run("B-Q8"))
    command = [sys.executable, "-m", "tests.support.interpreted_experts", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


def test_a_layer_computes_what_vllms_own_runner_does(report: Any) -> None:
    """With the addition in the sum, and beyond it."""
    records = report["steps"]
    assert [(record["tokens"], record["sums"]) for record in records] == [(1, 1), (3, 1), (32, 1), (33, 0)]
    for record in records:
        assert record["error"] <= 2e-6, record
        assert record["watched"], record


def test_ranks_are_summed_once_and_of_both_parts(report: Any) -> None:
    """As vLLM's own runner does it: routed and shared experts together, once a step."""
    assert [(record["kind"], record["tokens"]) for record in report["ranks"]] == [
        ("tp_size", 3),
        ("tp_size", 33),
        ("ep_size", 3),
        ("ep_size", 33),
    ]
    for record in report["ranks"]:
        assert record["sums"] == [[record["tokens"]], [record["tokens"]]], record
        assert record["error"] <= 2e-6, record


def test_layers_are_fused_where_they_are_the_known_ones(report: Any) -> None:
    assert not any(report["built"]), "the CPU engine stays with vLLM's own runner"
    known, *changed = report["obstacles"]
    assert known is None
    assert changed == [
        "experts are chosen elsewhere",
        "experts are moved while serving",
        "there is no shared expert of its own",
        "what experts take or give is changed",
        "steps are divided between ranks",
        "experts are not of our kind",
    ]


def test_one_token_has_the_shared_expert_among_its_own(report: Any) -> None:
    """The kernels, interpreted, against vLLM's own runner and router; while someone records choices, vLLM chooses."""
    records = report["one"]
    assert [(record["tokens"], record["launched"]) for record in records] == [(1, 1), (2, 0)]
    for record in records:
        assert record["error"] <= 1e-5, record
        assert record["watched"], record


def test_only_a_shared_expert_like_the_routed_ones_is_among_them(report: Any) -> None:
    assert report["slots"] == [
        None,
        "the shared expert is of another kind",
        "the shared expert's weights are not ours",
        "the shared expert has a bias",
        "the shared expert is summed on its own",
        "experts are dealt out to ranks",
        "the shared expert has another shape than routed ones",
    ]


def test_only_what_the_known_router_would_choose_is_chosen_here(report: Any) -> None:
    assert report["choices"] == [
        None,
        "experts are chosen by groups",
        "experts are not chosen by sigmoids",
        "experts' weights are no shares",
        "experts have no bias in fp32",
        "experts have no bias in fp32",
        "the router's logits are not fp32",
        "the router chooses shared experts",
        "the router leaves out padding",
        "experts are dealt out to ranks",
        "experts are chosen by SimpleNamespace",
    ]


def test_the_runner_compiles_into_one_graph(report: Any) -> None:
    assert report["compiled"]


def test_launches_are_prepared(report: Any) -> None:
    assert report["prepared"] == ["together", "sum"]


def test_code_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    replaced.unknown.cache_clear()
    assert replaced.unknown("experts") == ()
    monkeypatch.setattr(MoERunner, "forward", MoERunner._forward_impl)
    replaced.unknown.cache_clear()
    assert replaced.unknown("experts") == ("MoERunner.forward",)
    monkeypatch.undo()
    replaced.unknown.cache_clear()


def test_levels_include_those_before_them() -> None:
    assert (FUSIONS[0], DEFAULT_FUSION) == ("off", "experts")
    assert [reaches("experts", level) for level in FUSIONS] == [True] * len(FUSIONS)
    assert not reaches("query", "experts")
