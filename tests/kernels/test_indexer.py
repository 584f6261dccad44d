"""Query preparation, the key cache and both logits kernels against the reference."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import indexer, reference
from glm5deploy.kernels.tuning import LogitsConfig
from tests.kernels.cases import e4m3, key_cache
from tests.support.compare import assert_close

BLOCK = 16
CONFIG = LogitsConfig(2, 16, 4, 2, 2)
FP8 = torch.float8_e4m3fn


def rows_of(table: torch.Tensor, request: int, length: int) -> torch.Tensor:
    """Slots of a request's first positions."""
    position = torch.arange(length)
    return table[request, position // BLOCK].long() * BLOCK + position % BLOCK


def filled_cache(blocks: int) -> torch.Tensor:
    cache = key_cache(blocks, BLOCK)
    reference.store_index_keys(cache, torch.randn(blocks * BLOCK, 128), torch.arange(blocks * BLOCK))
    return cache


@pytest.mark.parametrize("dtype", [FP8, torch.float16])
def test_queries_are_rotated_quantised_and_their_scale_folded(dtype: torch.dtype) -> None:
    q = torch.randn(3, 8, 128, dtype=torch.float16) * torch.tensor([1, 100, 1e-3])[:, None, None].half()
    q[1, 2] = 0
    weights, positions, table = torch.randn(3, 8), torch.tensor([0, 7, 3]), torch.rand(10, 64)
    values, folded = torch.empty(3, 8, 128, dtype=dtype), torch.empty(3, 8)
    indexer.prepare_index_query(q, weights, positions, table, 0.07, values, folded)
    expected, expected_folded = reference.prepare_index_query(q, weights, positions, table, 0.07)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(folded, expected_folded)


@pytest.mark.parametrize("tokens", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_are_normed_and_rotated(dtype: torch.dtype, tokens: int) -> None:
    """Out of a wider matrix, whose other columns are the head weights. Rounding may fall the other way, seldom."""
    wide = (3 * torch.randn(tokens, 160) + 1).to(dtype)
    wide[-1] = 5.0  # nothing is left of it but the bias
    weight, bias = torch.rand(128) + 0.5, torch.randn(128)
    positions, table = torch.arange(tokens) * 3 % 10, torch.rand(10, 64)
    out = torch.full((tokens, 128), torch.nan, dtype=dtype)
    indexer.prepare_index_key(wide[:, :128], weight, bias, 1e-6, positions, table, out)
    expected = reference.prepare_index_key(wide[:, :128], weight, bias, 1e-6, positions, table)
    assert expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 4e-3)
    assert (out != expected).float().mean() < (1 if dtype == torch.float32 else 0.02)


def test_keys_are_stored_like_the_reference_to_the_byte() -> None:
    cache, expected = key_cache(6, BLOCK), key_cache(6, BLOCK)
    keys = torch.randn(37, 128, dtype=torch.float16)
    keys[3] *= 1e-5
    keys[4] = 0
    keys[5] = torch.linspace(-448, 448, 128)
    slots = torch.randperm(96)[:37]
    slots[6] = -1
    indexer.store_index_keys(cache, keys, slots)
    reference.store_index_keys(expected, keys, slots)
    assert torch.equal(cache, expected)


def test_every_e4m3_number_and_every_tie_rounds_like_torch() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    grid = grid[grid.isfinite()].unique()
    middles = (grid[1:] + grid[:-1]) / 2
    numbers = torch.cat((grid, middles, middles * (1 + 2**-12), middles * (1 - 2**-12)))
    keys = torch.zeros((len(numbers) + 126) // 127, 128)
    keys[:, 0] = 448.0  # the scale of every row is 1
    keys[:, 1:] = torch.nn.functional.pad(numbers, (0, keys[:, 1:].numel() - len(numbers))).view(-1, 127)
    cache = key_cache(2, BLOCK)
    indexer.store_index_keys(cache, keys, torch.arange(len(keys)))
    stored = reference.index_cache_views(cache)[0].reshape(-1, 128)[: len(keys)]
    expected = keys.to(FP8)
    assert torch.equal(stored.view(FP8).float(), expected.float())


@pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.float32])
def test_gathered_keys_stand_request_after_request(dtype: torch.dtype) -> None:
    cache = filled_cache(8)
    table = torch.randperm(8, dtype=torch.int32).view(4, 2)
    lengths = torch.tensor([19, 0, 32, 1])
    cumulative = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    keys, scales = torch.empty(52, 128, dtype=dtype), torch.empty(52)
    indexer.gather_index_keys(cache, table, cumulative, keys, scales)
    slots = torch.cat([rows_of(table, r, int(n)) for r, n in enumerate(lengths)])
    expected = reference.load_index_keys(cache, slots)
    assert_close(keys.float() * scales[:, None] if dtype == FP8 else keys, expected)


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "16 bit"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_ragged_logits_score_each_query_over_its_own_keys(tokens: int, fp8: bool) -> None:
    q, weights = e4m3(tokens, 4), torch.randn(tokens, 4)
    k, scales = e4m3(77), torch.rand(77)
    starts = torch.tensor([0, 0, 37, 37, 37], dtype=torch.int32)[:tokens]
    ends = torch.tensor([21, 0, 38, 60, 77], dtype=torch.int32)[:tokens]
    logits = torch.full((tokens, 50), 7.0)
    if fp8:
        indexer.ragged_logits(q, k, scales, weights, starts, ends, logits, CONFIG)
    else:
        indexer.ragged_logits(q.half(), k.half(), None, weights, starts, ends, logits, CONFIG)
        scales = torch.ones(77)
    expected = reference.indexer_logits(q, k.float() * scales[:, None], weights)
    for t in range(tokens):
        length = int(ends[t] - starts[t])
        if length:
            assert_close(logits[t, :length], expected[t, starts[t] : ends[t]], limit=1e-3)
        assert (logits[t, length:] == 7.0).all()


@pytest.mark.parametrize("block", [0, 1])
def test_a_block_of_queries_without_keys_touches_nothing(block: int) -> None:
    """One of two blocks of queries is empty, and several programs share the keys of each."""
    q, k, weights, scales = e4m3(4, 4), e4m3(80), torch.randn(4, 4), torch.rand(80)
    ends = torch.full((4,), 80, dtype=torch.int32)
    ends[2 * block : 2 * block + 2] = 0
    logits = torch.full((4, 80), 7.0)
    indexer.ragged_logits(q, k, scales, weights, torch.zeros_like(ends), ends, logits, CONFIG)
    expected = reference.indexer_logits(q, k.float() * scales[:, None], weights)
    expected[ends == 0] = 7.0
    assert_close(logits, expected, limit=1e-3)


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "16 bit"])
@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_paged_logits_score_each_row_over_its_own_length(next_n: int, fp8: bool) -> None:
    cache = filled_cache(6)
    table = torch.randperm(6, dtype=torch.int32).view(2, 3)
    tokens = 2 * next_n
    q, weights = e4m3(tokens, 4), torch.randn(tokens, 4)
    lengths = torch.randint(1, 48, (tokens,), dtype=torch.int32)
    lengths[0], lengths[-1] = 0, 48
    logits = torch.full((tokens, 50), 7.0)
    indexer.paged_logits(q if fp8 else q.half(), cache, weights, lengths, table, logits, CONFIG)
    for t in range(tokens):
        length = int(lengths[t])
        keys = reference.load_index_keys(cache, rows_of(table, t // next_n, length))
        if length:
            assert_close(logits[t, :length], reference.indexer_logits(q[t : t + 1], keys, weights[t : t + 1])[0], 1e-3)
        assert (logits[t, length:] == 7.0).all()


def test_the_tables_choose_when_nothing_is_given() -> None:
    q, k = e4m3(3, 4), e4m3(40)
    weights, scales = torch.randn(3, 4), torch.rand(40)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 40, dtype=torch.int32)
    logits = torch.empty(3, 40)
    indexer.ragged_logits(q, k, scales, weights, starts, ends, logits)
    assert_close(logits, reference.indexer_logits(q, k.float() * scales[:, None], weights), limit=1e-3)
