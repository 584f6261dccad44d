"""The products with integers as they are compiled, run instruction by instruction against fp64 products."""

from __future__ import annotations

import json

import pytest

from tests.quants.integer_cases import ROUNDED
from tests.support.compiling import compiling

LIMIT = 4e-3  # relative error of bf16 numbers, root-mean-square


@pytest.mark.timeout(300)
def test_compiled_products_with_integers_equal_the_reference() -> None:
    results = [json.loads(line) for line in compiling("-m", "tests.quants.integer_programs")]
    products, changed = [r for r in results if "kernel" in r], [r for r in results if "changed" in r]
    assert [r["kernel"] for r in products] == ["gate_up"] * 7 + ["down"] * 5 + ["linear"] * 7
    for r in products:
        assert r["rms"] < LIMIT, r
        assert r["worst"] < 1, r
        # But where weights are rounded, sums are nearly exact before they are.
        assert r["off"] < (0.2 if any(name in r["case"] for name in ROUNDED) else 0.01), r
        assert not r["stray"], r
        assert not r["unfinished"], r
    assert ["not waited for" in r["noticed"] or "barrier" in r["noticed"] for r in changed] == [True] * 3, changed
