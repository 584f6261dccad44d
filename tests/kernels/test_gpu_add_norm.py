"""On a GPU: the norm between two parts of a layer, in bf16, against torch and vLLM's kernel; and how long both take.

Run there with `pytest -m gpu -s tests/kernels/test_gpu_add_norm.py`; vLLM's takes part where vLLM is installed.
"""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from glm5deploy.kernels.add_norm import PARTS, WARPS, add_norm, add_norm_reference
from glm5deploy.kernels.measure import graph_time

pytestmark = pytest.mark.gpu

WIDTH, EPS = 6144, 1e-5
COPIES = 4500  # of a weight, 12 KiB each: more than the L2 cache holds, as a step's other weights are
LAUNCHES = ((1, 8), (1, 16), (2, 8), (4, 4), (4, 8), (8, 4), (8, 8), (8, 16), (16, 4), (16, 8))  # parts and warps


def has_vllm() -> bool:
    if importlib.util.find_spec("vllm") is None:
        return False
    importlib.import_module("vllm.kernels")
    return hasattr(torch.ops._C, "fused_add_rms_norm")


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, residual, weight = (torch.randn(n, WIDTH, device="cuda").bfloat16() for n in (tokens, tokens, 1))
    return x, 3 * residual, 1 + 0.1 * weight[0]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_every_launch_gives_the_references_numbers(tokens: int, add: bool) -> None:
    """Twice the same, from a graph too; vLLM's sum to the bit, and its result but for ties."""
    x, residual, weight = inputs(tokens)
    given = residual if add else None
    expected, sums = add_norm_reference(x, given, weight, EPS)
    for parts, warps in LAUNCHES:
        found, total = add_norm(x, given, weight, EPS, parts, warps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again, total_again = add_norm(x, given, weight, EPS, parts, warps)
        graph.replay()
        assert torch.equal(total, sums)
        assert torch.equal(total_again, sums)
        assert torch.equal(again, found)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
        assert float((found == expected).float().mean()) > 0.999
    if has_vllm():
        theirs, their_sum = x.clone(), residual.clone()
        if add:
            torch.ops._C.fused_add_rms_norm(theirs, their_sum, weight, EPS)
            assert torch.equal(their_sum, sums)
        else:
            torch.ops._C.rms_norm(theirs, x, weight, EPS)
        same = float((add_norm(x, given, weight, EPS)[0] == theirs).float().mean())
        print(f"\n{tokens} tokens, {'added' if add else 'plain'}: {100 * same:.3f} % are vLLM's numbers")
        assert same > 0.999


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_how_long_both_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # filling fresh memory with poison would be timed too
    x, residual, weight = inputs(tokens)
    weights = weight.expand(COPIES, -1).contiguous()
    told = f"\n{tokens} tokens:"
    assert (PARTS, WARPS) in LAUNCHES
    for parts, warps in LAUNCHES:
        calls = [lambda w=w, p=parts, n=warps: add_norm(x, residual, w, EPS, p, n) for w in weights]
        mark = "*" if (parts, warps) == (PARTS, WARPS) else ""
        told += f" {parts}x{warps}{mark} {graph_time(calls, per_graph=COPIES):.2f}"
    if has_vllm():
        calls = [lambda w=w: torch.ops._C.fused_add_rms_norm(x, residual, w, EPS) for w in weights]
        told += f" us; vLLM's {graph_time(calls, per_graph=COPIES):.2f}"
    print(f"{told} us")
