"""On a GPU: experts' own programs choose the same ones by the router's logits as vLLM's kernel."""

from __future__ import annotations

import pytest
import torch

from tests.quants.choice_kernel import KINDS, choose, logits_of

pytestmark = pytest.mark.gpu

EXPERTS, TOPK, SCALE = 256, 8, 2.5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "strange"])
def test_the_same_experts_as_vllms_router(kind: str) -> None:
    """Of equal scores too; weights to the last bits."""
    from vllm import _custom_ops as ops

    for seed in range(100):
        logits, bias = (t.cuda() for t in logits_of(kind, EXPERTS, seed))
        bias = bias if seed % 2 or kind != "random" else bias / 100
        weights, theirs = ops.grouped_topk(logits, 1, 1, TOPK, True, SCALE, bias, 1)
        ids, scores = choose(logits, bias, TOPK, 2)
        assert ids.tolist() == theirs[0].tolist(), (seed, logits[0, ids.long()], logits[0, theirs[0].long()])
        shares = scores * SCALE / (scores.sum() + 1e-20)
        torch.testing.assert_close(shares, weights[0], rtol=1e-6, atol=1e-30)


def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    """Of a model that is broken already; vLLM's kernel passes over what is not finite, ours takes it first or last."""
    for seed in range(100):
        logits, bias = (t.cuda() for t in logits_of("strange", EXPERTS, seed))
        ids, _ = choose(logits, bias, TOPK, 2)
        assert ids.min() >= 0
        assert ids.max() < EXPERTS
