"""On a GPU: the router in one launch against vLLM's two, the sum with the shared expert, and how long they take.

Run there with `pytest -m gpu -s tests/vllm_plugin/test_gpu_experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants.moe_kernel import sum_kernel
from glm5deploy.quants.products import SUM_SPAN
from glm5deploy.quants.router import LAUNCHES, MOST_TOKENS, RouterLaunch, router

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, TOPK, SCALE = 256, 6144, 8, 2.5
COPIES = 12  # of the weights: more than the L2 cache holds
OTHERS = (
    *(RouterLaunch(1, 1, 4, 1), RouterLaunch(1, 1, 1, 4), RouterLaunch(1, 2, 2, 2), RouterLaunch(1, 2, 1, 8)),
    *(RouterLaunch(4, 1, 4, 1), RouterLaunch(8, 2, 1, 8), RouterLaunch(8, 4, 2, 8)),
)
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def case(tokens: int, seed: int = 0) -> Case:
    """Activations, weights whose logits have standard deviation 1, and a bias."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(EXPERTS, HIDDEN, device="cuda", generator=generator) / HIDDEN**0.5
    return x, weight, 0.1 * torch.randn(EXPERTS, device="cuda", generator=generator)


def vllms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights as vLLM's engine launches them on Hopper and later; elsewhere its product is cuBLAS's."""
    import vllm._custom_ops as ops
    from vllm.model_executor.kernels.linear.cute_dsl import ll_fp32w

    own = ll_fp32w.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    logits = ll_fp32w.LL_FP32W_GEMM_KERNEL(x, weight) if own else x.float() @ weight.T
    weights, ids = ops.grouped_topk(logits, 1, 1, TOPK, True, SCALE, bias, 1)
    return ids, weights


def check(ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Against float64, as far as fp32 tells scores apart."""
    scores = (x.double() @ weight.double().T).sigmoid()
    choice = scores + bias.double()
    best = choice.sort(1, descending=True)[0][:, :TOPK]
    assert all(len(set(row)) == TOPK for row in ids.tolist())
    torch.testing.assert_close(choice.gather(1, ids.long()), best, rtol=0, atol=4e-6)
    chosen = scores.gather(1, ids.long())
    torch.testing.assert_close(weights.double(), SCALE * chosen / chosen.sum(1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", range(1, MOST_TOKENS + 1))
def test_experts_and_weights_are_vllms(tokens: int) -> None:
    """In the same order, but where two scores are nearer than a product's rounding."""
    arguments = case(tokens, tokens)
    ids, weights = router(*arguments, TOPK, SCALE)
    check(ids, weights, *arguments)
    theirs, their_weights = vllms(*arguments)
    check(theirs, their_weights, *arguments)
    same = ids == theirs
    assert float(same.float().mean()) > 0.95
    torch.testing.assert_close(weights[same], their_weights[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_equal_scores_are_decided_as_vllm_decides_them(tokens: int) -> None:
    """Logits of few different values, exact in any order of summing, and a bias beside which they vanish."""
    levels = torch.randint(-2, 3, (EXPERTS, tokens), device="cuda").float()
    weight = torch.zeros(EXPERTS, HIDDEN, device="cuda")
    weight[:, :tokens] = levels
    x = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    x[:, :tokens] = torch.eye(tokens, device="cuda")
    for bias in (torch.zeros(EXPERTS, device="cuda"), 1e9 * torch.randint(0, 2, (EXPERTS,), device="cuda").float()):
        ids, weights = router(x, weight, bias, TOPK, SCALE)
        theirs, their_weights = vllms(x, weight, bias)
        assert torch.equal(ids, theirs)
        torch.testing.assert_close(weights, their_weights, rtol=1e-5, atol=0)


@pytest.mark.parametrize("config", [*LAUNCHES, *OTHERS], ids=str)
def test_every_launch_replays_from_a_graph(config: RouterLaunch) -> None:
    """Many times over: each must find the counter as the first did."""
    x, weight, bias = case(config.tokens)
    router(x, weight, bias, TOPK, SCALE, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [router(x, weight, bias, TOPK, SCALE, config) for _ in range(3)]
    for seed in range(20):
        x.copy_(case(config.tokens, seed)[0])
        graph.replay()
        for ids, weights in results:
            check(ids, weights, x, weight, bias)
            assert torch.equal(weights, results[0][1])


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_how_long_routers_take(tokens: int) -> None:
    cases = [case(tokens, seed) for seed in range(COPIES)]

    def calls(config: RouterLaunch) -> list[Callable[[], object]]:
        return [lambda c=c: router(*c, TOPK, SCALE, config) for c in cases]

    for config in (*LAUNCHES, *OTHERS):
        if config.tokens == tokens:
            print(f"\n{tokens} tokens: {config} {graph_time(calls(config)):.2f} us", end="")
    print(f"\n{tokens} tokens: vLLM's two launches {graph_time([lambda c=c: vllms(*c) for c in cases]):.2f} us")


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_how_long_sums_take(tokens: int) -> None:
    terms = torch.randn(tokens * TOPK, HIDDEN, device="cuda")
    ids = torch.zeros(tokens, TOPK, dtype=torch.int32, device="cuda")
    shared = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    out = torch.empty_like(shared)

    def add_up(also: bool) -> None:
        grid = (tokens, -(-HIDDEN // SUM_SPAN))
        sum_kernel[grid](terms, ids, shared, out, HIDDEN, TOPK=TOPK, BN=SUM_SPAN, ALSO=also, num_warps=4)

    add_up(True)
    expected = terms.view(tokens, TOPK, -1).double().sum(1) + shared.double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    apart = graph_time([lambda: (add_up(False), torch.add(shared, out))])
    print(f"\n{tokens} tokens: sum and addition {apart:.2f} us, in one {graph_time([lambda: add_up(True)]):.2f} us")
