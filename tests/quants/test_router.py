"""The router in one launch against float64, and by vLLM's rule for equal scores, under the interpreter."""

from __future__ import annotations

import json
import math

import pytest
import torch

from glm5deploy.quants.router import LAUNCHES, MOST_TOKENS, RouterLaunch, router, router_reference
from tests.support.compiling import compiling

SCALE = 2.5


def case(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens as a part of wider rows, weights whose logits have standard deviation 1, and a bias."""
    generator = torch.Generator().manual_seed(experts * k + tokens)
    x = torch.randn(tokens, k + 8, generator=generator).bfloat16()[:, :k]
    return x, torch.randn(experts, k, generator=generator) / k**0.5, 0.1 * torch.randn(experts, generator=generator)


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, topk: int, config: RouterLaunch | None) -> None:
    """Ids and weights are those of float64, as far as fp32 tells scores apart."""
    ids, weights = router(x, weight, bias, topk, SCALE, config)
    scores = (x.double() @ weight.double().T).sigmoid()
    choice = scores + bias.double()
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert all(len(set(row)) == topk for row in ids.tolist())
    best = choice.sort(1, descending=True)[0][:, :topk]
    torch.testing.assert_close(choice.gather(1, ids.long()), best, rtol=0, atol=4e-6)
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(weights.double(), SCALE * chosen / chosen.sum(1, keepdim=True), rtol=1e-5, atol=0)


def logits(rows: list[list[float]], bias: list[float], topk: int) -> tuple[list[list[int]], torch.Tensor]:
    """What the router makes of these logits: their tokens are unit vectors."""
    wanted = torch.tensor(rows)
    x = torch.eye(len(rows)).bfloat16()
    ids, weights = router(x, wanted.T.contiguous(), torch.tensor(bias), topk, SCALE)
    expected = router_reference(x, wanted.T.contiguous(), torch.tensor(bias), topk, SCALE)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=0, equal_nan=True)
    return ids.tolist(), weights


@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "k"),
    [(1, 256, 8, 300), (2, 17, 3, 200), (3, 60, 8, 640), (8, 8, 8, 130), (1, 4, 1, 2560)],
)
def test_experts_and_weights_are_those_of_float64(tokens: int, experts: int, topk: int, k: int) -> None:
    check(*case(tokens, experts, k), topk, None)


@pytest.mark.parametrize("config", [*LAUNCHES, RouterLaunch(2, 4, 3, 1), RouterLaunch(1, 16, 5, 2)], ids=str)
def test_every_launch_selects_the_same(config: RouterLaunch) -> None:
    for tokens in sorted({1, config.tokens}):
        x, weight, bias = case(tokens, 20, 400)
        check(x, weight, bias, 6, config)
        assert torch.equal(router(x, weight, bias, 6, SCALE, config)[0], router_reference(x, weight, bias, 6, SCALE)[0])


def test_of_equal_scores_the_first_experts_are_taken() -> None:
    rows = [[0.5] * 12, [0.0, 1.0] * 6, [3.0, -3.0, 1.0] * 4]
    chosen, weights = logits(rows, [0.0] * 12, 4)
    assert chosen == [[0, 1, 2, 3], [1, 3, 5, 7], [0, 3, 6, 9]]
    torch.testing.assert_close(weights, torch.full((3, 4), SCALE / 4))


def test_a_bias_chooses_and_does_not_weigh() -> None:
    """Biases so large that scores vanish beside them, negative ones, and one that no score reaches."""
    rows = [[0.1 * i for i in range(8)], [5.0, -5.0] * 4]
    assert logits(rows, [1e8, 0, 0, 1e8, 0, 0, 0, 0], 3)[0] == [[0, 3, 7], [0, 3, 2]]
    assert logits(rows, [-3.0, -1, -3, -3, -3, -2, -3, -1], 2)[0] == [[7, 1], [1, 7]]
    chosen, weights = logits(rows, [-math.inf] * 6 + [0.0, math.inf], 3)
    assert chosen == [[7, 6, 0], [7, 6, 0]]
    assert weights.isfinite().all()


def test_scores_that_are_ones_zeros_or_no_numbers() -> None:
    """Every token has as many different experts as it should, whatever the logits are."""
    chosen, weights = logits([[200.0] * 6, [-200.0] * 6], [0.0] * 6, 3)
    assert chosen == [[0, 1, 2], [0, 1, 2]]
    assert weights[1].tolist() == [0, 0, 0]
    _, weight, bias = case(1, 12, 40)
    ids, weights = router(torch.full((2, 40), torch.nan).bfloat16(), weight, bias, 5, SCALE)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert weights.isnan().all()


def test_what_it_cannot_do_is_refused() -> None:
    x, weight, bias = case(MOST_TOKENS + 1, 8, 32)
    with pytest.raises(ValueError, match="8 tokens at most, not 9"):
        router(x, weight, bias, 2, SCALE)
    with pytest.raises(ValueError, match="fit"):
        router(x[:1, :16], weight, bias, 2, SCALE)
    with pytest.raises(ValueError, match="fp32"):
        router(x[:1], weight.bfloat16(), bias, 2, SCALE)
    assert router(x[:0], weight, bias, 2, SCALE)[0].shape == (0, 2)


@pytest.mark.slow
def test_it_compiles_for_every_gpu() -> None:
    """Within the smallest shared memory, without spilling; on Hopper single warps hold all their reads in registers."""
    capabilities = (80, 86, 89, 90, 100, 120, 121)
    lines = compiling("-m", "tests.quants.compile_router", *map(str, capabilities), timeout=800)
    found = [json.loads(line) for line in lines]
    assert {f["capability"] for f in found} == set(capabilities)
    assert all(f["shared"] <= 48 << 10 and f["stack"] == 0 for f in found), found
    assert {f["tokens"] for f in found if f["capability"] == 90} == {c.tokens for c in LAUNCHES}
    assert all(f["registers"] >= 100 for f in found if f["warps"] == 1), found
