"""On a GPU: what comes before attention, in bf16, against torch and the separate launches; and how long it takes.

Run there with `pytest -m gpu -s tests/kernels`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.latent_input import latent_input, latent_input_reference
from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.query_input import query_input, query_input_reference
from glm5deploy.kernels.row_product import BESIDE_TOKENS, row_product
from glm5deploy.kernels.slots import Lookup, slots_from_positions
from tests.support.compare import relative_rms

pytestmark = pytest.mark.gpu

BLOCK, RANK, NOPE, EPS, TOPK = 64, 2048, 192, 1e-5, 2048
ROUNDING = 2**-8  # a unit in the last place of bf16, relative


class Case:
    """A layer's tensors at ``tokens`` tokens; every fifth has no slot."""

    def __init__(self, tokens: int, heads: int = 8) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        angles = torch.arange(4096, device="cuda")[:, None] * 1e-2 ** (torch.arange(32, device="cuda") / 32)[None, :]
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).bfloat16()
        self.x, self.q = random(tokens, RANK + 576), random(tokens, heads * (NOPE + 64)).view(tokens, heads, -1)
        self.weight = (random(heads, NOPE + 256, 512) * 0.05)[:, :NOPE]
        self.norms = 1 + 0.1 * random(RANK), 1 + 0.1 * random(512)
        self.positions = torch.randint(0, 4096, (tokens,), device="cuda")
        self.slots = torch.randperm(4 * tokens, device="cuda")[:tokens]
        self.slots[::5] = -1
        self.blocks = -(-4 * tokens // BLOCK)
        self.rows = random(tokens, 6144), random(160, 6144) * 0.02
        self.product = random(tokens, 160)
        table = torch.randperm(64 * tokens, device="cuda").int().view(tokens, 64)  # of contexts of 4096
        selected = torch.randint(-1, 4096, (tokens, TOPK), device="cuda").int()
        requests, slots = torch.arange(tokens, device="cuda").int(), torch.empty_like(selected)
        self.lookup = Lookup(selected, requests, table, BLOCK, slots, torch.empty_like(requests), 70)

    def cache(self, packed: bool) -> torch.Tensor:
        if packed:
            return torch.zeros(self.blocks, BLOCK, 656, dtype=torch.uint8, device="cuda")
        return torch.full((self.blocks, BLOCK, 576), torch.nan, dtype=torch.bfloat16, device="cuda")

    def latents(self, cache: torch.Tensor) -> torch.Tensor:
        return latent_input(self.x, *self.norms, EPS, self.positions, self.cos_sin, self.slots, cache)

    def with_product(self, cache: torch.Tensor) -> torch.Tensor:
        arguments = (self.x, *self.norms, EPS, self.positions, self.cos_sin, self.slots, cache)
        return latent_input(*arguments, (*self.rows, self.product))

    def then_product(self, cache: torch.Tensor) -> None:
        self.latents(cache)
        row_product(*self.rows)

    def queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        return query_input(self.q, self.weight, self.positions, self.cos_sin)

    def with_slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        return query_input(self.q, self.weight, self.positions, self.cos_sin, self.lookup)

    def then_queries(self) -> tuple[torch.Tensor, torch.Tensor]:
        slots_from_positions(*self.lookup)
        return self.queries()


def replayed(call: Callable[[], object]) -> None:
    """Once as it is, which compiles, and once from a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 2, 17, 1000])
def test_latents_are_what_separate_operations_store(tokens: int) -> None:
    case = Case(tokens)
    arguments = (case.x, *case.norms, EPS, case.positions, case.cos_sin)
    expected_q, rows = latent_input_reference(*arguments)
    cache = case.cache(packed=False)
    found = case.latents(cache)
    torch.testing.assert_close(found, expected_q, rtol=ROUNDING, atol=1e-3)
    assert float((found == expected_q).float().mean()) > 0.99
    kept = case.slots >= 0
    stored = cache.view(-1, 576)[case.slots[kept]]
    torch.testing.assert_close(stored, rows[kept], rtol=ROUNDING, atol=1e-3)
    assert int((~cache.view(-1, 576).isnan().any(1)).sum()) == int(kept.sum()), "a row that has no slot was written"


@pytest.mark.parametrize("tokens", [1, 17, 1000])
def test_packed_rows_are_those_of_the_stored_latents(tokens: int) -> None:
    """To the byte, from the rows that the plain cache got."""
    case = Case(tokens)
    plain, packed, expected = case.cache(packed=False), case.cache(packed=True), case.cache(packed=True)
    case.latents(plain)
    case.latents(packed)
    kept = case.slots >= 0
    rows = plain.view(-1, 576)[case.slots[kept]]
    store_latent(rows[:, :512], rows[:, 512:], case.slots[kept], expected)
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", range(1, BESIDE_TOKENS + 1))
def test_hidden_states_are_multiplied_beside_latents(tokens: int, packed: bool) -> None:
    case = Case(tokens)
    cache, expected_cache = case.cache(packed), case.cache(packed)
    assert torch.equal(case.with_product(cache), case.latents(expected_cache))
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    hidden, weight = case.rows
    assert relative_rms(case.product.float(), hidden.float() @ weight.float().T) <= 4e-3


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 300])
def test_queries_are_near_the_reference(tokens: int, heads: int) -> None:
    case = Case(tokens, heads)
    latent, rope = case.queries()
    expected_latent, expected_rope = query_input_reference(case.q, case.weight, case.positions, case.cos_sin)
    assert relative_rms(latent.float(), expected_latent.float()) <= 4e-3
    torch.testing.assert_close(rope, expected_rope, rtol=ROUNDING, atol=1e-2)
    assert float((rope == expected_rope).float().mean()) > 0.99


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("tokens", [1, 8, 16, 17, 300])
def test_rows_looked_up_beside_queries_are_the_references(tokens: int, heads: int) -> None:
    case = Case(tokens, heads)
    expected = case.queries()
    for found, alone in zip(case.with_slots(), expected, strict=True):
        assert torch.equal(found, alone)
    selected, requests, table, _, slots, counts, rows_per_block = case.lookup
    expected_slots, expected_counts = reference.slots_from_positions(selected, requests, table, BLOCK, rows_per_block)
    assert torch.equal(slots, expected_slots)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_both_replay_from_a_graph_and_tell_how_long_they_take(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # filling fresh memory with poison would be timed too
    cases = [Case(tokens) for _ in range(8)]
    caches = [case.cache(packed=False) for case in cases]
    replayed(lambda: cases[0].latents(caches[0]))
    replayed(cases[0].queries)
    latents = [lambda c=case, k=cache: c.latents(k) for case, cache in zip(cases, caches, strict=True)]
    replayed(cases[0].with_slots)
    if tokens <= BESIDE_TOKENS:
        replayed(lambda: cases[0].with_product(caches[0]))
        both = [lambda c=case, k=cache: c.with_product(k) for case, cache in zip(cases, caches, strict=True)]
        turns = [lambda c=case, k=cache: c.then_product(k) for case, cache in zip(cases, caches, strict=True)]
        print(f"\nlatents with an index product {graph_time(both):.2f} us, in two launches {graph_time(turns):.2f}")
    queries, with_slots = [case.queries for case in cases], [case.with_slots for case in cases]
    out = torch.empty(tokens, 8, 512, dtype=torch.bfloat16, device="cuda")
    apart = [
        lambda c=case: torch.bmm(c.q[..., :NOPE].transpose(0, 1), c.weight, out=out.transpose(0, 1)) for case in cases
    ]
    print(
        f"\n{tokens} tokens: norms, RoPE and store {graph_time(latents):.2f} us; W_UK and RoPE "
        f"{graph_time(queries):.2f} us, cuBLAS's W_UK alone {graph_time(apart):.2f} us; with a selection's slots "
        f"{graph_time(with_slots):.2f} us, {graph_time([case.then_queries for case in cases]):.2f} in two launches"
    )
