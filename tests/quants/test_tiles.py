"""Launches that no table takes yet: loads where they are multiplied, and experts in tiles of two widths."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import products, reference
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from tests.quants.test_products import DEVICE, LIMIT, MIXED, check_moe, planes_of, rms_error, routing, tokens

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


def experts_of(names: tuple[str, str, str], units: int) -> tuple[Planes, Planes, Planes]:
    gate, up = planes_of(names[0], units, 256, 5), planes_of(names[1], units, 256, 5, seed=50)
    return gate, up, planes_of(names[2], 70, units, 5, seed=90)


def uneven(t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of five experts a token: one has all of them, one a ninth, one none; every seventh token has one expert."""
    ids, weights = routing(t, 2, 5)
    ids[:, 0], ids[:, 1] = 3, torch.where(torch.arange(t, device=DEVICE) % 9 == 0, 1, 4)
    ids[::7, 1] = -1
    return ids, weights


NARROW = (Launch(32, 16, warps=1, narrow=8), Launch(64, 16, tiles=2, warps=2, narrow=8))
BOTH = (
    Launch(64, 16, warps=2, stages=2, narrow=8, late=True, registers=128),
    Launch(32, 16, tiles=3, warps=1, stages=2, narrow=8, late=True),
)
LATE_EXPERTS = (Launch(64, 8, warps=2, stages=2, late=True), Launch(64, 8, tiles=2, warps=2, stages=2, late=True))


@pytest.mark.parametrize("configs", [NARROW, BOTH, LATE_EXPERTS], ids=["narrow", "narrow-late", "late"])
@pytest.mark.parametrize("t", [8, 9, 16, 25])
def test_experts_of_any_number_of_pairs(
    configs: tuple[Launch, Launch], t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts on both sides of 8 and 16, and what is left of an expert behind its first chunks."""
    monkeypatch.setattr(products.launch, "SEARCH_PAIRS", 0)
    experts = experts_of(("Q4_K", "Q8_0", "Q8_0"), 64)
    check_moe(*experts, tokens(t, 256), *uneven(t), configs=configs)


@pytest.mark.parametrize("names", MIXED, ids=str)
def test_experts_of_mixed_types(names: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.launch, "SEARCH_PAIRS", 0)
    units = FORMATS[names[2]].block_elements
    check_moe(*experts_of(names, units), tokens(20, 256), *uneven(20), configs=BOTH)


def test_experts_with_several_super_blocks_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.launch, "SEARCH_PAIRS", 0)
    check_moe(*experts_of(("Q5_1", "Q4_K", "Q4_0"), 544), tokens(20, 256), *uneven(20), configs=BOTH)


def test_searched_pairs_have_one_width() -> None:
    """Programs that find their pairs themselves know no list of chunks: ``narrow`` says nothing to them."""
    check_moe(*experts_of(("Q4_K", "Q8_0", "Q8_0"), 64), tokens(20, 256), *uneven(20), configs=BOTH)
