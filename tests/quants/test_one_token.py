"""Experts of few tokens with the shared one among them, and the choice of one token's, against fp32 and torch."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import one_token, reference
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.token_experts import Choice, Shared
from tests.quants.choice_kernel import KINDS, choose, logits_of
from tests.quants.test_products import DEVICE, LIMIT, planes_of, poison, rms_error, tokens

__all__ = ["poison"]  # a fixture that every test here uses

Experts = tuple[Planes, Planes, Planes]


@pytest.fixture(scope="module")
def experts() -> Experts:
    return planes_of("Q4_K", 32, 512, 5), planes_of("Q5_K", 32, 512, 5, seed=9), planes_of("Q8_0", 40, 32, 5, seed=5)


def shared_of(joined: bool) -> Shared:
    down = planes_of("Q5_0", 40, 32, seed=61)
    if joined:
        return Shared((planes_of("Q5_K", 64, 512, seed=60),), down)
    return Shared((planes_of("Q8_0", 32, 512, seed=60), planes_of("Q6_K", 32, 512, seed=62)), down)


PARTS = Launch(16, 8, parts=2, warps=2), Launch(32, 8, tiles=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("experts", "topk", "warps"), [(256, 8, 2), (60, 6, 1), (20, 20, 4)])
def test_chosen_experts(kind: str, experts: int, topk: int, warps: int) -> None:
    logits, bias = (t.to(DEVICE) for t in logits_of(kind, experts))
    ids, scores = choose(logits, bias, topk, warps)
    assert ids.tolist() == Choice(logits, bias, topk, 1.0).chosen()[0][0].tolist()
    torch.testing.assert_close(scores, logits.sigmoid()[0, ids.long()], equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "joined", "configs"), [("random", True, None), ("tied", False, PARTS), ("random", True, PARTS)], ids=str
)
def test_one_token_chooses_its_experts(experts: Experts, kind: str, joined: bool, configs: object) -> None:
    logits, bias = (t.to(DEVICE) for t in logits_of(kind, 5))
    x, shared, choice = tokens(1, 512), shared_of(joined), Choice(logits, bias, 3, 2.5)
    expected = reference.experts_of_one(x, *experts, shared, choice)
    for _ in range(2):  # the second call finds the tickets as the first left them
        found = one_token.experts(x, *experts, shared, choice, configs=configs)  # type: ignore[arg-type]
        assert rms_error(found, expected) < LIMIT


def test_experts_that_do_not_fit_are_refused(experts: Experts) -> None:
    gate, _, down = experts
    fine = shared_of(True)
    assert fine.fits(*experts)
    assert shared_of(False).fits(*experts)
    (joined,) = fine.gate_up
    for wrong in (
        Shared((gate.slice(0, 1), joined), fine.down),
        Shared((joined.slice(0, 1),) * 2, fine.down),
        Shared((planes_of("Q8_0", 32, 512),), fine.down),
        Shared((joined,), planes_of("Q8_0", 48, 32)),
        Shared((joined,), down),
    ):
        assert not wrong.fits(*experts)
    with pytest.raises(ValueError, match="do not fit"):
        one_token.experts(tokens(2, 512), *experts, fine, Choice(torch.zeros(2, 5), torch.zeros(5), 3, 1.0))
    with pytest.raises(ValueError, match="cannot be chosen"):
        one_token.experts(tokens(1, 512), *experts, fine, Choice(torch.zeros(1, 6), torch.zeros(6), 3, 1.0))
