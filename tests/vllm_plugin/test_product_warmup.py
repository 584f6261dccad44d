"""Warm-up launches every variant of the products that a step of any size launches, by Triton's own keys."""

from __future__ import annotations

import json

import pytest

from tests.support.compiling import compiling


def compared() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(compiling("-m", "tests.vllm_plugin.product_keys", timeout=300)[-1])
    return found


@pytest.mark.slow
def test_no_step_launches_what_warm_up_did_not() -> None:
    found = compared()
    assert found["missing"] == []
    names = {line.partition(":")[0].rpartition(".")[2] for line in found["noticed"]}
    assert names == {"sum_kernel", "one_gate_up_kernel", "one_down_kernel"}, "launches that are left out must show"
