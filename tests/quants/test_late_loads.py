"""Launches that load codes and activations where they are multiplied."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import products, reference
from glm5deploy.quants.launch import Launch
from tests.quants.test_products import LIMIT, planes_of, rms_error, tokens

LATE = Launch(64, 16, warps=2, stages=2, late=True)


# One of each width of the planes, with and without minima, groups of 16 and 32 weights, and weights as they are
WAYS = ("Q4_K", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "Q5_1", "IQ2_S", "BF16")


@pytest.mark.parametrize("name", WAYS)
def test_late_linear_is_bit_for_bit_the_early_one(name: str) -> None:
    planes, x = planes_of(name, 40, 256), tokens(9, 256)
    early = products.linear(x, planes, config=Launch(64, 16, warps=2, stages=2))
    late = products.linear(x, planes, config=LATE)
    assert torch.equal(late, early)
    assert rms_error(late, reference.linear(x, planes)) < LIMIT


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (16, 100, 768, Launch(64, 16, parts=3, warps=2, stages=2, late=True, registers=112)),
        (17, 33, 288, Launch(32, 16, warps=1, stages=2, late=True)),
        (5, 70, 800, Launch(32, 8, parts=2, warps=1, late=True)),
    ],
    ids=str,
)
def test_late_linear_of_odd_sizes(m: int, n: int, k: int, config: Launch) -> None:
    planes, x = planes_of("Q8_0", n, k), tokens(m, k)
    for _ in range(2):  # the second call finds the tickets as the first left them
        assert rms_error(products.linear(x, planes, config=config), reference.linear(x, planes)) < LIMIT
