"""The launches before attention: latents normed, rotated and stored; queries absorbed and rotated."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import query_input as query_module
from glm5deploy.kernels import reference
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.latent_input import latent_input, latent_input_reference
from glm5deploy.kernels.layout import PACKED_ROW_BYTES, QK_DIM
from glm5deploy.kernels.query_input import query_input, query_input_reference
from glm5deploy.kernels.slots import Lookup
from tests.kernels.cases import paged_bytes

BLOCK = 16
EPS = 1e-5


def angles(count: int, dtype: torch.dtype) -> torch.Tensor:
    turned = torch.arange(count)[:, None] * 0.37 ** torch.arange(32)[None, :]
    return torch.cat((turned.cos(), turned.sin()), dim=1).to(dtype)


def plain_cache(blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """NaN everywhere; blocks lie apart."""
    memory = torch.full((blocks, BLOCK + 4, QK_DIM), torch.nan, dtype=dtype)
    return memory[:, :BLOCK]


def inputs(tokens: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens as a slice of wider rows, and the weights of both norms."""
    x = torch.randn(tokens, rank + QK_DIM + 24).to(dtype)[:, : rank + QK_DIM]
    return x, (1 + torch.rand(rank)).to(dtype), (1 + torch.rand(512)).to(dtype)


@pytest.mark.parametrize(("tokens", "rank"), [(1, 2048), (7, 96), (33, 200), (2, 1536)])
def test_latents_are_normed_rotated_and_stored(tokens: int, rank: int) -> None:
    x, q_weight, kv_weight = inputs(tokens, rank, torch.float32)
    positions, cos_sin = torch.randint(0, 50, (tokens,)), angles(50, torch.float32)
    slots = torch.randperm(3 * BLOCK)[:tokens]
    slots[tokens // 2 : tokens // 2 + tokens // 3] = -1
    cache = plain_cache(3, torch.float32)
    q = latent_input(x, q_weight, kv_weight, EPS, positions, cos_sin, slots, cache)
    expected_q, rows = latent_input_reference(x, q_weight, kv_weight, EPS, positions, cos_sin)
    torch.testing.assert_close(q, expected_q)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(cache[slot // BLOCK, slot % BLOCK], rows[token])
    others = [s for s in range(3 * BLOCK) if s not in slots.tolist()]
    assert all(cache[s // BLOCK, s % BLOCK].isnan().all() for s in others)


def test_the_norm_is_rounded_before_rows_are_packed() -> None:
    """To the byte as two operations after one another, of numbers that both roundings tell apart."""
    x, q_weight, kv_weight = inputs(9, 64, torch.float16)
    positions, cos_sin = torch.arange(9) * 5, angles(50, torch.float16)
    slots = torch.randperm(2 * BLOCK)[:9]
    slots[4] = -1
    cache, expected = paged_bytes(2, BLOCK, PACKED_ROW_BYTES), paged_bytes(2, BLOCK, PACKED_ROW_BYTES)
    latent_input(x, q_weight, kv_weight, EPS, positions, cos_sin, slots, cache)
    _, rows = latent_input_reference(x, q_weight, kv_weight, EPS, positions, cos_sin)
    store_latent(rows[:, :512], rows[:, 512:], slots, expected)
    assert torch.equal(cache, expected)
    assert not torch.equal(cache, paged_bytes(2, BLOCK, PACKED_ROW_BYTES))


def test_half_precision_is_rounded_as_separate_operations_round() -> None:
    x, q_weight, kv_weight = inputs(5, 128, torch.float16)
    positions, cos_sin = torch.randint(0, 50, (5,)), angles(50, torch.float16)
    cache = plain_cache(1, torch.float16)
    q = latent_input(x, q_weight, kv_weight, EPS, positions, cos_sin, torch.arange(5), cache)
    expected, rows = latent_input_reference(x, q_weight, kv_weight, EPS, positions, cos_sin)
    # The order of a sum is the kernel's own: a number that falls on the other side of a tie is a unit away.
    torch.testing.assert_close(q, expected, rtol=2**-10, atol=0)
    torch.testing.assert_close(cache[0, :5], rows, rtol=2**-10, atol=0)
    assert (q == expected).float().mean() > 0.99
    assert torch.equal(cache[0, :5, 512:], rows[:, 512:])


@pytest.mark.parametrize(("tokens", "outputs", "width"), [(1, 10, 6144), (2, 7, 1000), (2, 9, 512), (2, 160, 300)])
def test_hidden_states_are_multiplied_beside(tokens: int, outputs: int, width: int) -> None:
    """The product is torch's, the rest what it is without; a program's second column or both may not be there."""
    x, q_weight, kv_weight = inputs(tokens, 96, torch.float32)
    positions, cos_sin = torch.arange(tokens), angles(50, torch.float32)
    hidden, weight = torch.randn(tokens, width), torch.full((outputs + 1, width), torch.nan)
    weight[:outputs] = torch.randn(outputs, width)
    memory = torch.full((tokens * outputs + 1,), -9.0)
    cache, expected_cache = plain_cache(1, torch.float32), plain_cache(1, torch.float32)
    arguments = (x, q_weight, kv_weight, EPS, positions, cos_sin, positions + 3)
    product = memory[:-1].view(tokens, outputs)
    q = latent_input(*arguments, cache, (hidden, weight[:outputs], product))
    assert torch.equal(q, latent_input(*arguments, expected_cache))
    torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(product, (hidden.double() @ weight[:outputs].double().T).float(), rtol=1e-5, atol=1e-4)
    assert memory[-1] == -9
    with pytest.raises(ValueError, match=r"must be \[.*, N\]"):
        latent_input(*arguments, cache, (hidden, weight[:outputs], product[:, 1:]))


def test_tokens_without_a_slot_are_normed_and_not_stored() -> None:
    """Padding of a CUDA graph, and the profiling run, which has no cache."""
    x, q_weight, kv_weight = inputs(6, 64, torch.float32)
    positions, cos_sin = torch.zeros(6, dtype=torch.int64), angles(1, torch.float32)
    cache = plain_cache(1, torch.float32)
    arguments = (x, q_weight, kv_weight, EPS, positions, cos_sin)
    expected, _ = latent_input_reference(*arguments)
    torch.testing.assert_close(latent_input(*arguments, torch.tensor([3, 1]), cache), expected)
    assert [row for row in range(BLOCK) if not cache[0, row].isnan().any()] == [1, 3]
    untouched = plain_cache(1, torch.float32)
    torch.testing.assert_close(latent_input(*arguments, torch.empty(0, dtype=torch.int64), untouched), expected)
    assert untouched.isnan().all()
    with pytest.raises(ValueError, match="needs a position"):
        latent_input(*arguments, torch.zeros(7, dtype=torch.int64), cache)


@pytest.mark.parametrize(("tokens", "heads", "nope"), [(1, 8, 192), (3, 2, 48), (16, 3, 64), (17, 2, 32), (40, 1, 128)])
def test_queries_are_absorbed_and_rotated(tokens: int, heads: int, nope: int) -> None:
    q = torch.randn(tokens, heads * (nope + 64) + 8)[:, : heads * (nope + 64)].view(tokens, heads, nope + 64)
    whole = torch.randn(heads, nope + 16, 512)  # W_UK is a part of a larger weight
    positions, cos_sin = torch.randint(0, 50, (tokens,)), angles(50, torch.float32)
    latent, rope = query_input(q, whole[:, :nope], positions, cos_sin)
    expected_latent, expected_rope = query_input_reference(q, whole[:, :nope], positions, cos_sin)
    torch.testing.assert_close(latent, expected_latent, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope, expected_rope)


@pytest.mark.parametrize(("tokens", "heads", "columns"), [(1, 8, 64), (3, 2, 50), (17, 4, 2048), (2, 1, 4096)])
def test_rows_of_the_selection_are_looked_up_beside(tokens: int, heads: int, columns: int) -> None:
    """As by a launch of their own, with positions of two requests, none, and some beyond the table; nothing else."""
    table, requests = torch.randperm(40, dtype=torch.int32).view(2, 20), torch.arange(tokens, dtype=torch.int32) % 2
    selected = torch.randint(-1, 22 * BLOCK, (tokens + 1, columns + 3), dtype=torch.int32)[:tokens, :columns]
    q, weight = torch.randn(tokens, heads, 96), torch.randn(heads, 32, 512)
    positions, cos_sin = torch.randint(0, 50, (tokens,)), angles(50, torch.float32)
    wide, counted = torch.full((tokens, columns + 1), -9, dtype=torch.int32), torch.full((tokens + 1,), -9).int()
    lookup = Lookup(selected, requests, table, BLOCK, wide[:, :columns], counted[:tokens], 2 * BLOCK)
    latent, rope = query_input(q, weight, positions, cos_sin, lookup)
    slots, counts = reference.slots_from_positions(selected, requests, table, BLOCK, 2 * BLOCK)
    assert torch.equal(wide[:, :columns], slots)
    assert torch.equal(counted[:tokens], counts)
    assert wide[:, columns].eq(-9).all()
    assert counted[tokens] == -9
    for found, expected in zip((latent, rope), query_input(q, weight, positions, cos_sin), strict=True):
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="of the same tokens"):
        query_input(q[:0], weight, positions[:0], cos_sin, lookup)


def test_both_ways_of_absorbing_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weight = torch.randn(9, 2, 112).half(), torch.randn(2, 48, 512).half()
    positions, cos_sin = torch.arange(9), angles(9, torch.float16)
    one = query_input(q, weight, positions, cos_sin)
    monkeypatch.setattr(query_module, "MOST_TOKENS", 8)
    other = query_input(q, weight, positions, cos_sin)
    torch.testing.assert_close(one[0], other[0], rtol=2e-3, atol=2e-2)
    assert torch.equal(one[1], other[1])
    assert torch.equal(one[1], reference.rope_interleaved(q[..., 48:], positions, cos_sin).half())
