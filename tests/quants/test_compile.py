"""Kernels compile for every GPU we serve on, inside its shared memory and without spilling much."""

from __future__ import annotations

import json

import pytest

from glm5deploy.quants.formats import FORMATS
from tests.support.compiling import compiling

# KiB of shared memory a program may have (CUDA programming guide, "Technical Specifications per Compute Capability")
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99}
CASES = ("linear:Q4_K:64", "linear:Q4_K:16", "short:Q5_K:16", "one:Q5_K:1", "long:Q6_K:1", "long:Q6_K:16")
CASES += ("linear:Q6_K:1", "pair:Q5_K,Q8_0:1", "queries:Q8_0,Q8_0:1", "queries:Q8_0,Q8_0:16")
CASES += ("gate_up:Q5_K,Q4_K:1", "gate_up:Q5_K,Q4_K:64", "down:Q6_K:1")
CASES += ("down:Q6_K:2048", "one_down:Q4_K,Q6_K:1")
LONG = dict.fromkeys((86, 90), ("one_gate_up:Q4_K,Q4_K,Q5_K,Q5_K:1",))  # by capability: half a minute each
# Kernels that are chained where a GPU can
CHAINED = ("linear", "short", "one", "long", "pair", "queries", "gate_up", "down", "one_gate_up", "one_down")
AROUND = ("sort", "sum", "fit", "sort_fit")
INTEGERS = ("linear:Q4_K:16", "linear:Q6_K:64", "long:Q6_K:1", "long:Q6_K:64", "gate_up:Q5_K,Q6_K:64")
INTEGERS += ("gate_up:Q2_K,Q3_K:512", "gate_up:Q6_K,Q6_K:4096", "down:Q6_K:64", "down:Q5_K:512", "deep:Q6_K:4096")
INTEGERS += ("deepest:Q6_K:64",)
# One type of each way to store codes and scales; the first GPU with everything the kernels use compiles them all.
TYPES = ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K", "IQ4_XS", "MXFP4", "IQ3_S", "IQ2_S", "IQ2_XXS", "BF16")
# Bytes of stack a thread: hardly any for tiles of 8 tokens; those of 16 hold a super-block's activations in registers
FEW_SPILL, MANY_SPILL = 64, 1024
LIMITED_SPILL = 384  # where half of the registers are taken away, so that a multiprocessor holds twice the programs


def compiled(capability: int, *cases: str) -> list[dict[str, int]]:
    lines = compiling("-m", "tests.quants.compile_check", str(capability), *cases, timeout=800)
    found = [json.loads(line) for line in lines]
    assert [f["case"] for f in found] == list(cases)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_fits_the_gpu(capability: int) -> None:
    for found in compiled(capability, *CASES, *LONG.get(capability, ())):
        assert found["shared"] <= SHARED[capability] * 1024
        kind = found["case"].split(":")[0]
        few = LIMITED_SPILL if kind == "one_gate_up" else FEW_SPILL
        assert found["stack"] <= (MANY_SPILL if found["case"].endswith(":2048") else few)
        assert found["waits"] == (capability >= 90 and kind in CHAINED)
        assert not found["early"]


def test_launches_around_products_keep_the_order_of_a_chain() -> None:
    for found in compiled(90, *AROUND):
        assert found["waits"]
        assert not found["early"]


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_products_with_integers_fit_the_gpu(capability: int) -> None:
    for found in compiled(capability, *(f"integer_{case}" for case in INTEGERS)):
        assert found["shared"] <= SHARED[capability] * 1024
        assert found["stack"] <= 512
        assert found["waits"] == (capability >= 90)
        assert not found["early"]


@pytest.mark.slow
def test_every_way_to_store_weights_compiles() -> None:
    chosen = {
        (f.low, f.high, bool(f.table), f.scales)
        for f in (FORMATS[t] for t in (*TYPES, "Q4_K", "Q5_K", "IQ4_NL", "Q4_1"))
    }
    assert chosen == {(f.low, f.high, bool(f.table), f.scales) for f in FORMATS.values()}
    for found in compiled(80, *(f"dense:{t}:0" if t != "BF16" else "linear:BF16:16" for t in TYPES), "dense:IQ4_NL:0"):
        assert found["shared"] <= SHARED[80] * 1024
        assert found["stack"] == 0
