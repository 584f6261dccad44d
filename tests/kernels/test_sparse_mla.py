"""The sparse attention kernel and its combine pass against the reference."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.attention import sparse_mla_fwd, split_workspace_elements
from glm5deploy.kernels.latent_cache import store_latent
from glm5deploy.kernels.tuning import SparseConfig
from tests.kernels.cases import Sparse, sparse_case
from tests.support.compare import assert_close

SCALE = 0.06
SMALL = SparseConfig(16, 16, 4, 2, 1)
WIDE = SparseConfig(32, 32, 4, 2, 1)


def check(case: Sparse, config: SparseConfig = SMALL, splits: int | None = 1) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = sparse_mla_fwd(case.q, case.rows, case.slots, None, SCALE, config=config, splits=splits)
    expected, expected_lse = reference.sparse_mla(case.q, case.rows, case.slots, SCALE)
    assert_close(out, expected)
    assert_close(lse, expected_lse, limit=2e-3)
    return out, lse


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 64, 128])
def test_every_number_of_heads(heads: int) -> None:
    check(sparse_case(tokens=2, heads=heads, keys=21))


@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 111])
@pytest.mark.parametrize("splits", [1, 3])
def test_any_number_of_selected_positions(keys: int, splits: int) -> None:
    check(sparse_case(tokens=2, heads=8, keys=keys), splits=splits)


def test_the_table_chooses_when_nothing_is_given() -> None:
    check(sparse_case(tokens=3, heads=8, keys=70), config=None, splits=None)  # type: ignore[arg-type]


def test_fp32_is_exact_to_rounding() -> None:
    check(sparse_case(tokens=2, heads=5, keys=40, dtype=torch.float32), WIDE, splits=2)


def test_the_number_of_splits_does_not_matter() -> None:
    case = sparse_case(tokens=2, heads=4, keys=80, dtype=torch.float32)
    one, lse = check(case)
    for splits in (2, 5):
        out, lse_split = check(case, splits=splits)
        assert_close(out, one)
        assert_close(lse_split, lse)


def test_the_order_of_the_slots_does_not_matter() -> None:
    case = sparse_case(tokens=2, heads=4, keys=40, dtype=torch.float32)
    out, lse = check(case)
    shuffled, lse_shuffled = check(Sparse(case.q, case.rows, case.slots[:, torch.randperm(40)]))
    assert_close(shuffled, out)
    assert_close(lse_shuffled, lse)


@pytest.mark.parametrize("splits", [1, 4])
def test_a_token_without_slots_gives_zeros(splits: int) -> None:
    case = sparse_case(tokens=3, heads=8, keys=64)
    case.slots[:] = -1
    out, lse = sparse_mla_fwd(case.q, case.rows, case.slots, None, SCALE, config=SMALL, splits=splits)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("splits", [1, 3])
def test_entries_past_the_count_are_not_looked_at(splits: int) -> None:
    case = sparse_case(tokens=4, heads=2, keys=48)
    counts = torch.tensor([48, 5, 17, 0], dtype=torch.int32)
    cut = case.slots.clone()
    for t, count in enumerate(counts):
        cut[t, count:] = -1
        # A slot past the count that points at poison shows whether it was read.
        case.slots[t, count:] = int(case.rows.isnan().any(1).nonzero()[0])
    out, lse = sparse_mla_fwd(case.q, case.rows, case.slots, counts, SCALE, config=SMALL, splits=splits)
    expected, expected_lse = reference.sparse_mla(case.q, case.rows, cut, SCALE)
    assert_close(out, expected)
    assert_close(lse, expected_lse, limit=2e-3)


def test_q_may_come_in_two_parts_with_any_strides() -> None:
    case = sparse_case(tokens=3, heads=4, keys=20)
    # The latent part of q comes out of a batched product: [H, T, 512] in memory.
    nope = case.q[..., :512].transpose(0, 1).contiguous().transpose(0, 1)
    rope = torch.cat((case.q[..., 512:], case.q[..., 512:]), dim=-1)[..., :64]
    out, _ = sparse_mla_fwd((nope, rope), case.rows, case.slots, None, SCALE, config=SMALL, splits=1)
    assert_close(out, reference.sparse_mla(case.q, case.rows, case.slots, SCALE)[0])


@pytest.mark.parametrize("splits", [1, 3])
def test_packed_rows_are_read_as_they_unpack(splits: int) -> None:
    case = sparse_case(tokens=2, heads=8, keys=40)
    packed = reference.pack_fp8_ds_mla(case.rows)
    expected_rows = reference.unpack_fp8_ds_mla(packed)
    out, lse = sparse_mla_fwd(case.q, packed, case.slots, None, SCALE, config=SMALL, splits=splits)
    expected, expected_lse = reference.sparse_mla(case.q, expected_rows, case.slots, SCALE)
    assert_close(out, expected)
    assert_close(lse, expected_lse, limit=2e-3)


def test_packed_rows_as_an_fp16_model_writes_them() -> None:
    """The cache keeps the RoPE part in bf16 whatever the model's type is: writer and reader must agree on it."""
    latent, rope = torch.randn(8, 512).half(), torch.randn(8, 64).half()
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    store_latent(latent, rope, torch.arange(8), cache)
    q, slots = torch.randn(2, 4, 576).half() * 2, torch.arange(8, dtype=torch.int32).repeat(2, 1)
    out, lse = sparse_mla_fwd(q, cache[0], slots, None, SCALE, config=SMALL, splits=1)
    expected, expected_lse = reference.sparse_mla(q, reference.unpack_fp8_ds_mla(cache[0]), slots, SCALE)
    assert_close(out, expected)
    assert_close(lse, expected_lse, limit=2e-3)
    # And both mean the values that were stored: what is left is the rounding of the packed layout.
    assert_close(out, reference.sparse_mla(q, torch.cat((latent, rope), 1), slots, SCALE)[0], limit=0.05)


def test_very_large_and_very_small_scores_stay_finite() -> None:
    case = sparse_case(tokens=2, heads=2, keys=20, dtype=torch.float32)
    big = Sparse(case.q * 1e4, case.rows, case.slots)
    check(big, splits=2)
    check(Sparse(-case.q.abs() * 1e4, case.rows.abs(), case.slots), splits=2)


def test_results_go_where_they_are_asked_for_and_scratch_suffices() -> None:
    case = sparse_case(tokens=3, heads=8, keys=64)
    out, lse = torch.empty(3, 8, 512, dtype=torch.float16), torch.empty(3, 8)
    workspace = torch.empty(split_workspace_elements(8, 64, torch.device("cpu"), packed=False))
    got, got_lse = sparse_mla_fwd(case.q, case.rows, case.slots, None, SCALE, out, lse, workspace)
    assert got.data_ptr() == out.data_ptr()
    assert got_lse.data_ptr() == lse.data_ptr()
    assert_close(out, reference.sparse_mla(case.q, case.rows, case.slots, SCALE)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: (c.q[..., :500], c.rows, c.slots), "RoPE"),
        (lambda c: (c.q, c.rows[:, :500], c.slots), "contiguous"),
        (lambda c: (c.q, c.rows.double(), c.slots), "type"),
        (lambda c: (c.q, c.rows, c.slots.long()), "int32"),
    ],
)
def test_wrong_shapes_are_named(change, words: str) -> None:  # type: ignore[no-untyped-def]
    q, rows, slots = change(sparse_case(tokens=2, heads=2, keys=8))
    with pytest.raises(ValueError, match=words):
        sparse_mla_fwd(q, rows, slots, None, SCALE, config=SMALL, splits=1)


def test_no_tokens_no_launch() -> None:
    case = sparse_case(tokens=1, heads=2, keys=8)
    out, lse = sparse_mla_fwd(case.q[:0], case.rows, case.slots[:0], None, SCALE)
    assert out.shape == (0, 2, 512)
    assert lse.shape == (0, 2)
