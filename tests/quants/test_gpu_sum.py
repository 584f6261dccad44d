"""On a GPU: the sum over experts with the shared expert in it, and how long it takes.

Run there with `pytest -m gpu -s tests/quants/test_gpu_sum.py`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants.moe_kernel import sum_kernel
from glm5deploy.quants.routed_experts import SUM_SPAN

pytestmark = pytest.mark.gpu

HIDDEN, TOPK = 6144, 8


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_how_long_sums_take(tokens: int) -> None:
    terms = torch.randn(tokens * TOPK, HIDDEN, device="cuda")
    ids = torch.zeros(tokens, TOPK, dtype=torch.int32, device="cuda")
    shared = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    out = torch.empty_like(shared)

    def add_up(also: bool) -> None:
        grid = (tokens, -(-HIDDEN // SUM_SPAN))
        sum_kernel[grid](terms, ids, shared, out, HIDDEN, TOPK=TOPK, BN=SUM_SPAN, ALSO=also, CHAINED=False, num_warps=4)

    add_up(True)
    expected = terms.view(tokens, TOPK, -1).double().sum(1) + shared.double()
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=1e-5)
    apart = graph_time([lambda: (add_up(False), torch.add(shared, out))])
    print(f"\n{tokens} tokens: sum and addition {apart:.2f} us, in one {graph_time([lambda: add_up(True)]):.2f} us")
