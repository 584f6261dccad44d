"""The products with integers as they are compiled, run instruction by instruction against fp64 products."""

from __future__ import annotations

import json

import pytest

from tests.support.compiling import compiling

ROUNDED = 4e-3  # relative error of bf16 numbers, root-mean-square


@pytest.mark.timeout(300)
def test_compiled_products_with_integers_equal_the_reference() -> None:
    results = [json.loads(line) for line in compiling("-m", "tests.quants.integer_programs")]
    products, changed = [r for r in results if "kernel" in r], [r for r in results if "changed" in r]
    assert [r["kernel"] for r in products] == ["gate_up"] * 6 + ["down"] * 4 + ["linear"] * 5
    for r in products:
        assert r["rms"] < ROUNDED, r
        assert r["worst"] < 1, r
        # But for the rounding of Q6_K's weights, sums are nearly exact before they are rounded.
        assert r["off"] < (0.2 if "Q6_K" in r["case"] else 0.01), r
        assert not r["stray"], r
        assert not r["unfinished"], r
    assert ["not waited for" in r["noticed"] or "barrier" in r["noticed"] for r in changed] == [True] * 3, changed
