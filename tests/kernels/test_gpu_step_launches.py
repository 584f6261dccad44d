"""On a GPU: W_UV with attention's combination, and index queries with their keys, each in one launch and in several.

Run there with `pytest -m gpu -s tests/kernels/test_gpu_step_launches.py`; prints how long both ways take.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm5deploy.kernels import indexer
from glm5deploy.kernels.attention import (
    combine_dims,
    combine_splits,
    sparse_mla_fwd,
    sparse_mla_values,
    split_keys,
    split_workspace_elements,
)
from glm5deploy.kernels.chain import chained
from glm5deploy.kernels.index_input import index_input
from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.sparse_mla import combine_splits_kernel
from glm5deploy.kernels.tuning import gpu, index_value_dtype, sparse_config
from glm5deploy.kernels.value_output import (
    MOST_ROWS,
    value_columns,
    value_output,
    value_output_reference,
    value_warps,
)
from tests.support.compare import relative_rms

pytestmark = pytest.mark.gpu

HEADS, NOPE, VALUES, TOPK, J, BLOCK, EPS = 8, 192, 256, 2048, 32, 64, 1e-6
DEVICE = torch.device("cuda")
COPIES = 48  # of a layer's weights, 2 MiB each: more than the L2 cache holds
ROUNDING = 2**-8  # a unit in the last place of bf16, relative


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def weights(heads: int = HEADS) -> torch.Tensor:
    """W_UV [H, 512, V] as vLLM has it: for each head V rows of 512, behind those of W_UK."""
    return (random(heads, NOPE + VALUES, 512) * 0.05)[:, NOPE:].transpose(1, 2)


def table_splits(tokens: int, heads: int = HEADS) -> int:
    of = gpu(DEVICE)
    config = sparse_config(of, False, heads, tokens)
    return split_keys(TOPK, config.splits(tokens, heads, TOPK, of.multiprocessors), config.block_keys)[0]


class Parts:
    """What attention leaves of ``tokens``: its splits' outputs and lse, some of them without a slot."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.splits = tokens, table_splits(tokens)
        size = tokens * HEADS * self.splits
        self.partial, self.lse = torch.randn(size * 512, device=DEVICE), torch.randn(size, device=DEVICE)
        empty = torch.rand(size, device=DEVICE) < 0.2
        self.lse[empty] = -torch.inf
        self.partial.view(size, 512)[empty] = 0
        self.out = torch.empty(tokens, HEADS, VALUES, dtype=torch.bfloat16, device=DEVICE)
        self.latent = torch.empty(tokens, HEADS, 512, dtype=torch.bfloat16, device=DEVICE)
        self.latent_lse = torch.empty(tokens, HEADS, device=DEVICE)

    def at_once(self, weight: torch.Tensor, columns: int | None = None, warps: int | None = None) -> torch.Tensor:
        return value_output(self.partial, self.lse, self.splits, weight, self.out, columns, warps)

    def apart(self, weight: torch.Tensor) -> torch.Tensor:
        rows = self.tokens * HEADS
        dims = combine_dims(rows, gpu(DEVICE))
        grid, parts = (rows, 512 // dims), combine_splits(self.splits)
        arguments = (self.partial, self.lse, self.latent, self.latent_lse, self.splits)
        combine_splits_kernel[grid](*arguments, BS=parts, BD=dims, num_warps=4, **chained(DEVICE))
        torch.bmm(self.latent.transpose(0, 1), weight, out=self.out.transpose(0, 1))
        return self.out


# Values of a program and warps.
LAUNCHES = ((16, 4), (16, 8), (16, 16), (32, 4), (32, 8), (64, 8))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_values_are_near_the_reference_and_tell_how_long_they_take(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # filling fresh memory with poison would be timed too
    parts, layers = Parts(tokens), [weights() for _ in range(COPIES)]
    expected = value_output_reference(parts.partial, parts.lse, parts.splits, layers[0], torch.bfloat16)
    chosen = value_columns(tokens * HEADS, VALUES)
    chosen = chosen, value_warps(parts.splits, chosen)
    assert chosen in LAUNCHES
    told = f"\n{tokens} tokens, {parts.splits} splits: combination and W_UV apart "
    told += f"{graph_time([lambda w=w: parts.apart(w) for w in layers], per_graph=COPIES):.2f} us, at once"
    for columns, warps in LAUNCHES:
        found = parts.at_once(layers[0], columns, warps).clone()
        assert relative_rms(found.float(), expected.float()) <= 4e-3
        calls = [lambda w=w, c=columns, n=warps: parts.at_once(w, c, n) for w in layers]
        mark = "*" if (columns, warps) == chosen else ""
        told += f" {columns}x{warps}{mark} {graph_time(calls, per_graph=COPIES):.2f}"
    apart = parts.apart(layers[0])
    torch.testing.assert_close(parts.at_once(layers[0]), apart, rtol=2 * ROUNDING, atol=2e-3)
    print(told)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (3, 8), (8, 8), (9, 8), (1, 64)])
def test_attention_gives_values_in_a_graph(tokens: int, heads: int) -> None:
    """Over poisoned scratch memory and rows, with contexts that leave splits without a slot; twice the same."""
    rows = random(4096, 576)
    rows[2048:] = torch.nan
    slots = torch.randint(0, 2048, (tokens, TOPK), dtype=torch.int32, device=DEVICE)
    counts = torch.full((tokens,), TOPK, dtype=torch.int32, device=DEVICE)
    counts[0] = 70
    q, weight = random(tokens, heads, 576), weights(heads)
    workspace = torch.full((split_workspace_elements(heads, TOPK, DEVICE),), torch.nan, device=DEVICE)
    out = torch.full((tokens, heads, VALUES), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    arguments = (q, rows, slots, counts, 0.06)
    sparse_mla_values(*arguments, weight, out, workspace)
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_values(*arguments, weight, out, workspace)
    out.fill_(torch.nan)
    workspace.fill_(torch.nan)
    graph.replay()
    latent, _ = sparse_mla_fwd(*arguments)
    expected = torch.einsum("thl,hlv->thv", latent.float(), weight.float())
    assert torch.equal(out, first)
    assert relative_rms(out.float(), expected) <= 4e-3
    assert tokens * heads > MOST_ROWS or table_splits(tokens, heads) > 1, "values of few tokens come in one launch"


class Index:
    """A layer's index tensors at ``tokens`` tokens; every fifth has no slot."""

    def __init__(self, tokens: int) -> None:
        self.q, wide = random(tokens, J, 128), random(tokens, 128 + J)
        self.key, self.weights = wide[:, :128], wide[:, 128:]
        self.norm = 1 + torch.rand(128, device=DEVICE), torch.randn(128, device=DEVICE), EPS
        self.positions, self.cos_sin = torch.randint(0, 4096, (tokens,), device=DEVICE), random(4096, 64)
        self.slots = torch.randperm(4 * tokens, device=DEVICE)[:tokens]
        self.slots[::5] = -1
        self.blocks = -(-4 * tokens // BLOCK)
        self.values = torch.empty(tokens, J, 128, device=DEVICE).to(index_value_dtype(gpu(DEVICE)))
        self.folded, self.normed = torch.empty(tokens, J, device=DEVICE), torch.empty_like(self.key)

    def cache(self) -> torch.Tensor:
        return torch.zeros(self.blocks, BLOCK, 132, dtype=torch.uint8, device=DEVICE)

    def at_once(self, cache: torch.Tensor) -> None:
        step = (self.q, self.key, self.weights, self.norm, self.positions, self.cos_sin, 0.1, self.slots, cache)
        index_input(*step, self.values, self.folded)

    def apart(self, cache: torch.Tensor) -> None:
        indexer.prepare_index_key(self.key, *self.norm, self.positions, self.cos_sin, self.normed)
        indexer.store_index_keys(cache, self.normed, self.slots)
        prepared = (self.q, self.weights, self.positions, self.cos_sin, 0.1)
        indexer.prepare_index_query(*prepared, self.values, self.folded)

    def left(self, run: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        cache = self.cache()
        self.values.view(torch.uint8).fill_(0x11)
        self.folded.fill_(-3)
        run(cache)
        return [self.values.view(torch.uint8).clone(), self.folded.clone(), cache]


@pytest.mark.parametrize("tokens", [1, 2, 17, 1000])
def test_index_queries_and_keys_are_those_of_three_launches(tokens: int) -> None:
    """To the byte."""
    case = Index(tokens)
    for found, expected in zip(case.left(case.at_once), case.left(case.apart), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 8, 32, 8192])
def test_index_inputs_tell_how_long_they_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cases = [Index(tokens) for _ in range(8 if tokens <= 32 else 2)]
    caches = [case.cache() for case in cases]
    apart = graph_time([lambda c=c, k=k: c.apart(k) for c, k in zip(cases, caches, strict=True)])
    at_once = graph_time([lambda c=c, k=k: c.at_once(k) for c, k in zip(cases, caches, strict=True)])
    print(f"\n{tokens} tokens: index queries, keys and store apart {apart:.2f} us, at once {at_once:.2f} us")
