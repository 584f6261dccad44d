"""Errors that bench_quants.py refuses must not be those of exact arithmetic: rounding alone stays below its limit."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import launch
from glm5deploy.quants.formats import FORMATS
from scripts.quant_speed import cases, report


def true_errors(name: str, tokens: int) -> tuple[float, float]:
    """Of a product with weights rounded to bf16 and activations around 8: as it is judged, and against fp32 weights."""
    torch.manual_seed(1)
    dense = cases.weights(name, 192, 512).dense()[0]
    x = (torch.randn(tokens, 512).to(torch.bfloat16) + 8).to(torch.bfloat16)
    product = (x.float() @ dense.to(torch.bfloat16).float().T).to(torch.bfloat16)
    return cases.error(product, cases.exact_product(x, dense, 8)), cases.error(product, x.float() @ dense.T)


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_alone_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    for tokens in (launch.DENSE_TOKENS, 512):
        assert true_errors(name, tokens)[0] < report.LIMIT / 2


def test_a_types_few_values_are_rounded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why shifted activations are compared with rounded weights: of Q2_K even the exact product is off by more."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    assert true_errors("Q2_K", 512)[1] > report.LIMIT
