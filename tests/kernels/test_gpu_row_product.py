"""On a GPU: index keys and head weights of few tokens, in bf16, against fp64 and cuBLAS; and how long both take.

Run there with `pytest -m gpu -s tests/kernels/test_gpu_row_product.py`.
"""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.row_product import MOST_TOKENS, WARPS, row_product
from tests.support.compare import relative_rms

pytestmark = pytest.mark.gpu

WIDTH, OUTPUTS = 6144, 160
COPIES = 32  # of the weight, 2 MB each: more than the L2 cache holds
ALL_WARPS = (4, 8, 16)


def inputs(tokens: int, copies: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    return x, [(torch.randn(OUTPUTS, WIDTH, device="cuda") / WIDTH**0.5).bfloat16() for _ in range(copies)]


@pytest.mark.parametrize("warps", ALL_WARPS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 8])
def test_rows_are_no_further_off_than_cublas(tokens: int, warps: int) -> None:
    """And twice the same, from a graph too."""
    x, (weight,) = inputs(tokens, 1)
    expected = x.double() @ weight.double().T
    found = row_product(x, weight, warps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = row_product(x, weight, warps)
    graph.replay()
    assert torch.equal(again, found)
    error = relative_rms(found.double(), expected)
    assert error <= 2e-3
    assert error <= 1.05 * relative_rms(torch.nn.functional.linear(x, weight).double(), expected)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_how_long_both_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # filling fresh memory with poison would be timed too
    assert tokens <= MOST_TOKENS
    assert WARPS in ALL_WARPS
    x, weights = inputs(tokens, COPIES)
    told = f"\n{tokens} tokens: index product"
    for warps in ALL_WARPS:
        calls = [lambda w=w, n=warps: row_product(x, w, n) for w in weights]
        told += f" {warps}{'*' if warps == WARPS else ''} {graph_time(calls, per_graph=COPIES):.2f}"
    calls = [lambda w=w: torch.nn.functional.linear(x, w) for w in weights]
    print(f"{told} us, cuBLAS's {graph_time(calls, per_graph=COPIES):.2f} us")
