"""The references against the plainest possible loops, and against properties that must hold."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.layout import FP8_MAX, LATENT_DIM, PACKED_ROW_BYTES, SCALE_CANDIDATES
from tests.kernels.cases import key_cache, sparse_case
from tests.kernels.latent_scales import best_held
from tests.support.compare import assert_close


def test_sparse_mla_is_softmax_attention_over_the_selected_rows() -> None:
    case = sparse_case(tokens=5, heads=3, keys=17, dtype=torch.float32)
    out, lse = reference.sparse_mla(case.q, case.rows, case.slots, 0.06)
    for t in range(5):
        chosen = case.rows[case.slots[t][case.slots[t] >= 0].long()]
        if len(chosen) == 0:
            assert torch.equal(out[t], torch.zeros(3, LATENT_DIM))
            assert (lse[t] == -torch.inf).all()
            continue
        scores = case.q[t] @ chosen.T * 0.06
        assert_close(out[t], scores.softmax(-1) @ chosen[:, :LATENT_DIM])
        assert_close(lse[t], scores.logsumexp(-1))


def test_sparse_mla_gives_the_same_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    case = sparse_case(tokens=9, heads=2, keys=8, dtype=torch.float32)
    whole = reference.sparse_mla(case.q, case.rows, case.slots, 0.1)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 8 * 576 * 2)
    for a, b in zip(whole, reference.sparse_mla(case.q, case.rows, case.slots, 0.1), strict=True):
        assert_close(b, a)


def test_indexer_logits_sum_weighted_positive_parts() -> None:
    q, k, weights = torch.randn(3, 4, 128), torch.randn(6, 128), torch.randn(3, 4)
    expected = torch.zeros(3, 6)
    for t in range(3):
        for s in range(6):
            expected[t, s] = sum(weights[t, j] * max(0.0, float(q[t, j] @ k[s])) for j in range(4))
    assert_close(reference.indexer_logits(q, k, weights), expected)


@pytest.mark.parametrize("k", [1, 5, 50])
def test_select_topk_prefers_higher_scores_then_lower_positions(k: int) -> None:
    logits = torch.randint(-3, 3, (8, 30)).float()
    logits[2, 4:9] = torch.nan
    logits[3] = -torch.inf
    logits[4, ::2] = -0.0
    lengths = torch.tensor([0, 1, 20, 30, 25, 7, 30, 3])
    starts = torch.tensor([0, 29, 3, 0, 5, 20, 0, 10])
    chosen = reference.select_topk(logits, lengths, k, starts)
    for t in range(8):
        row = logits[t, starts[t] : starts[t] + lengths[t]].nan_to_num(nan=-torch.inf, neginf=-torch.inf).tolist()
        best = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])
        assert chosen[t].tolist() == best + [-1] * (k - len(best))


def test_quantise_fp8_takes_the_smallest_power_of_two_that_fits() -> None:
    x = torch.zeros(5, 128)
    x[0, 3], x[1, 3], x[2, 3], x[3, 3] = 448.0, 449.0, -1e-9, 7e30
    values, scale = reference.quantise_fp8(x)
    # 1e-4 / 448 lies between 2^-23 and 2^-22.
    assert scale.tolist() == [1.0, 2.0, 2.0**-22, 2.0 ** torch.tensor(7e30 / 448).log2().ceil().item(), 2.0**-22]
    assert values.float().isfinite().all()
    assert values.float()[0, 3] == 448.0


def test_packed_rows_survive_up_to_the_rounding_of_e4m3() -> None:
    rows = torch.randn(7, 576) * torch.tensor([1e-3, 1, 1e3, 1, 1, 0, 50])[:, None]
    packed = reference.pack_fp8_ds_mla(rows)
    assert packed.shape == (7, PACKED_ROW_BYTES)
    unpacked = reference.unpack_fp8_ds_mla(packed)
    assert torch.equal(unpacked[:, 512:], rows[:, 512:].bfloat16().float())
    # Half a unit of a 3-bit mantissa, and half a subnormal step of the group's scale, which is fitted by some percent.
    bound = rows[:, :512].abs() / 16 + rows[:, :512].view(7, 4, 128).abs().amax(-1).repeat_interleave(128, 1) * 2**-17
    bound += rows[:, :512].abs() / 50
    assert ((unpacked - rows)[:, :512].abs() <= bound + 1e-9).all()


def test_a_latents_scale_is_the_best_of_those_tried() -> None:
    x = torch.cat((torch.randn(300, 128), torch.rand(100, 128), torch.randn(100, 128).pow(3))).double()
    values, scale = reference.quantise_latent(x)
    error = (values.double() * scale[:, None].double() - x).pow(2).sum(-1)
    for i in range(SCALE_CANDIDATES):
        tried = (x.abs().amax(-1) / FP8_MAX * 2 ** (i / SCALE_CANDIDATES))[:, None]
        plain = ((x / tried).float().to(torch.float8_e4m3fn).double() * tried - x).pow(2).sum(-1)
        assert (error <= plain + 2**-16 * x.pow(2).sum(-1)).all()  # the scale is rounded to bf16
    noise = slice(0, 300)
    assert error[noise].sum().sqrt() / x[noise].norm() < 0.0232
    coarse, power = reference.quantise_fp8(x)
    assert error[noise].sum().sqrt() < 0.9 * (coarse.double() * power[:, None] - x)[noise].norm()
    assert torch.equal(scale, scale.bfloat16().float())


@pytest.mark.parametrize(("power", "more"), [(1, 1.02), (3, 1.03)], ids=["noise", "cubed"])
def test_a_latents_scale_is_near_the_best_of_all(power: int, more: float) -> None:
    """24 candidates leave 1.7 % more of noise's error than the layout's best scales; more of them would cost time."""
    x = torch.randn(256, 128).pow(power).double()
    values, scale = reference.quantise_latent(x)
    error = (values.double() * scale[:, None].double() - x).norm()
    best = best_held(x, 512)
    assert (best - x)[:16].norm() <= 1.0001 * (best_held(x[:16], 4096) - x[:16]).norm(), "512 are enough"
    assert (best - x).norm() <= error <= more * (best - x).norm()


def test_latents_of_any_size_are_quantised() -> None:
    x = torch.zeros(4, 128)
    x[1], x[2, 5], x[3] = 3.0, -1e-9, torch.linspace(-6e4, 6e4, 128)
    values, scale = reference.quantise_latent(x)
    held = values.float() * scale[:, None]
    assert (scale > 0).all()
    assert not held[0].any()
    assert (held[1] - x[1]).abs().max() <= 3 * 2**-8
    assert (held[2] - x[2]).abs().max() <= 1e-9
    assert ((held[3] - x[3]).norm() / x[3].norm()) < 0.03


def test_index_keys_return_from_a_cache_whose_blocks_lie_apart() -> None:
    cache = key_cache(blocks=4, block_size=16)
    slots = torch.tensor([3, -1, 63, 16, 0])
    keys = torch.randn(5, 128)
    before = cache.clone()
    reference.store_index_keys(cache, keys, slots)
    stored = reference.load_index_keys(cache, slots[slots >= 0])
    values, scale = reference.quantise_fp8(keys[slots >= 0])
    assert torch.equal(stored, values.float() * scale[:, None])
    changed = (reference.index_cache_views(cache)[0] != reference.index_cache_views(before)[0]).any(-1)
    assert changed.flatten().nonzero().flatten().tolist() == sorted(slots[slots >= 0].tolist())
    # Scales follow all values of their block: byte 16 * 128 of block 1 begins the scale of its first token.
    flat = cache.as_strided((4, 16 * 132), (cache.stride(0), 1))
    assert flat[1, 2048:2052].view(torch.float32).item() == scale[slots[slots >= 0].tolist().index(16)].item()


def test_rope_rotates_adjacent_pairs() -> None:
    angles = torch.rand(10, 32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    x = torch.randn(4, 2, 64)
    positions = torch.tensor([0, 9, 3, 3])
    rotated = reference.rope_interleaved(x, positions, table)
    turned = torch.view_as_complex(x.view(4, 2, 32, 2)) * torch.polar(torch.ones(4, 32), angles[positions])[:, None]
    assert_close(rotated, torch.view_as_real(turned).reshape(4, 2, 64))


def test_index_query_carries_its_scale_in_the_weights() -> None:
    q, weights = torch.randn(3, 4, 128), torch.randn(3, 4)
    table = torch.cat((torch.ones(5, 32), torch.zeros(5, 32)), dim=1)
    values, folded = reference.prepare_index_query(q, weights, torch.tensor([0, 1, 2]), table, 0.25)
    k = torch.randn(7, 128)
    exact = reference.indexer_logits(q, k, weights * 0.25)
    assert_close(reference.indexer_logits(values, k, folded), exact, limit=4e-2)


def test_slots_follow_the_block_table() -> None:
    table = torch.tensor([[5, 2], [0, 7]], dtype=torch.int32)
    positions = torch.tensor([[0, 17, -1], [16, 99, 3]], dtype=torch.int32)
    slots, counts = reference.slots_from_positions(positions, torch.tensor([0, 1]), table, 16, rows_per_block=20)
    assert slots.tolist() == [[100, 41, -1], [140, -1, 3]]
    assert counts.tolist() == [2, 2]
