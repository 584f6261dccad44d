"""Index queries and keys in one launch: to the byte what three launches leave, and near the reference."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import indexer, reference
from glm5deploy.kernels.index_input import index_input
from tests.kernels.cases import key_cache

BLOCK = 16
FP8 = torch.float8_e4m3fn
EPS = 1e-6


class Case:
    """A step's index tensors out of one wider product, as the engine has them; every third token has no slot."""

    def __init__(self, tokens: int, dtype: torch.dtype, heads: int = 8) -> None:
        wide = (3 * torch.randn(tokens, 128 + heads) + 1).to(dtype)
        self.key, self.weights = wide[:, :128], wide[:, 128:]
        self.q = (torch.randn(tokens, heads, 128) * torch.rand(tokens, heads, 1) ** 4).to(dtype)
        self.norm = torch.rand(128) + 0.5, torch.randn(128), EPS
        self.positions, self.cos_sin = torch.randint(0, 50, (tokens,)), torch.rand(50, 64).to(dtype)
        self.slots = torch.randperm(5 * BLOCK)[:tokens]
        self.slots[2::3] = -1

    def outputs(self, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, _ = self.q.shape
        return torch.empty(tokens, heads, 128, dtype=values), torch.empty(tokens, heads)

    def at_once(self, cache: torch.Tensor, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (self.q, self.key, self.weights, self.norm, self.positions, self.cos_sin, 0.07, self.slots, cache)
        return index_input(*arguments, *self.outputs(values))

    def apart(self, cache: torch.Tensor, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty_like(self.key)
        indexer.prepare_index_key(self.key, *self.norm, self.positions, self.cos_sin, out)
        indexer.store_index_keys(cache, out, self.slots)
        prepared = (self.q, self.weights, self.positions, self.cos_sin, 0.07)
        return indexer.prepare_index_query(*prepared, *self.outputs(values))


@pytest.mark.parametrize("tokens", [1, 4, 7, 33])
@pytest.mark.parametrize(("dtype", "values"), [(torch.float16, FP8), (torch.float16, torch.float16)])
def test_one_launch_leaves_what_three_do(tokens: int, dtype: torch.dtype, values: torch.dtype) -> None:
    case = Case(tokens, dtype)
    cache, expected = key_cache(5, BLOCK), key_cache(5, BLOCK)
    found, apart = case.at_once(cache, values), case.apart(expected, values)
    assert torch.equal(found[0].view(torch.uint8), apart[0].view(torch.uint8))
    assert torch.equal(found[1], apart[1])
    assert torch.equal(cache, expected)
    assert not torch.equal(cache, key_cache(5, BLOCK))


def test_one_launch_is_near_the_reference() -> None:
    """In fp32, where keys differ by less than e4m3 tells apart, but for ties."""
    case = Case(12, torch.float32)
    cache, expected = key_cache(5, BLOCK), key_cache(5, BLOCK)
    values, folded = case.at_once(cache, FP8)
    query, weights = reference.prepare_index_query(case.q, case.weights, case.positions, case.cos_sin, 0.07)
    assert torch.equal(values.float(), query.float())
    assert torch.equal(folded, weights)
    key = reference.prepare_index_key(case.key, *case.norm, case.positions, case.cos_sin)
    reference.store_index_keys(expected, key, case.slots)
    kept = case.slots[case.slots >= 0]
    stored, wanted = reference.load_index_keys(cache, kept), reference.load_index_keys(expected, kept)
    assert (stored != wanted).float().mean() < 0.01
    torch.testing.assert_close(stored, wanted, rtol=0.13, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    case = Case(4, torch.float16)
    case.slots = case.slots[:3]
    with pytest.raises(ValueError, match="every token needs"):
        case.at_once(key_cache(5, BLOCK), FP8)
