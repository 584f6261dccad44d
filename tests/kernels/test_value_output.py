"""The combination of attention's splits with W_UV in one launch, against the reference and the separate launches."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels import value_output as module
from glm5deploy.kernels.attention import sparse_mla_fwd, sparse_mla_values
from glm5deploy.kernels.tuning import SparseConfig
from glm5deploy.kernels.value_output import value_columns, value_output, value_output_reference, values_fuse
from tests.kernels.cases import sparse_case

SCALE = 0.06
SMALL = SparseConfig(16, 16, 4, 2, 1)


def value_weight(heads: int, values: int, dtype: torch.dtype) -> torch.Tensor:
    """[H, 512, V] as vLLM has it: for each head V rows of 512, behind those of W_UK."""
    return (torch.randn(heads, 48 + values, 512) * 0.1).to(dtype)[:, 48:].transpose(1, 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "splits", "values", "columns"),
    [(1, 8, 32, 32, None), (3, 2, 5, 48, 16), (2, 3, 17, 64, 64), (1, 1, 64, 16, None), (5, 1, 33, 96, 32)],
)
def test_parts_are_combined_and_multiplied(
    tokens: int, heads: int, splits: int, values: int, columns: int | None
) -> None:
    partial, lse = torch.randn(tokens, heads, splits, 512), 4 * torch.randn(tokens, heads, splits)
    lse[torch.rand(lse.shape) < 0.3] = -torch.inf
    lse[-1, -1] = -torch.inf  # a token without any slot
    partial[lse.isneginf()] = 0
    weight = value_weight(heads, values, torch.float32)
    expected = value_output_reference(partial.flatten(), lse.flatten(), splits, weight, torch.float32)
    assert not expected[-1, -1].any()
    out = value_output(
        partial.flatten(), lse.flatten(), splits, weight, torch.empty(tokens, heads, values), columns=columns
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "heads", "splits"), [(1, 8, 4), (3, 2, 6), (2, 4, 1)])
def test_attention_gives_values_as_two_launches_do(
    tokens: int, heads: int, splits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With poison in rows without a slot and in all fresh memory; one split is cuBLAS's."""
    case = sparse_case(tokens, heads, keys=80, dtype=dtype)
    counts = torch.tensor([80, 7, 33][:tokens], dtype=torch.int32)  # some splits have nothing
    weight = value_weight(heads, 32, dtype)
    assert values_fuse(tokens * heads, splits, weight) == (splits > 1)
    arguments = (case.q, case.rows, case.slots, counts, SCALE)
    out = torch.empty(tokens, heads, 32, dtype=dtype)
    assert sparse_mla_values(*arguments, weight, out, config=SMALL, splits=splits) is out
    latent, _ = sparse_mla_fwd(*arguments, config=SMALL, splits=splits)
    expected = torch.einsum("thl,hlv->thv", latent.float(), weight.float())
    error = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.float(), expected, rtol=error, atol=error)
    looked_at = torch.where(torch.arange(80) < counts[:, None], case.slots, -1)
    far = torch.einsum(
        "thl,hlv->thv", reference.sparse_mla(case.q, case.rows, looked_at, SCALE)[0].float(), weight.float()
    )
    torch.testing.assert_close(out.float(), far, rtol=5 * error, atol=5 * error)
    monkeypatch.setattr(module, "MOST_ROWS", 0)
    apart = sparse_mla_values(*arguments, weight, torch.empty_like(out), config=SMALL, splits=splits)
    torch.testing.assert_close(out, apart, rtol=error, atol=error)


def test_the_latent_is_rounded_before_it_is_multiplied() -> None:
    """Values of one split alone are those of the rounded latent, of which fp16 holds every product's terms."""
    partial, lse = torch.full((1, 1, 2, 512), 1 + 2**-12), torch.tensor([[[0.0, -torch.inf]]])
    weight = torch.ones(1, 16, 512, dtype=torch.float16).transpose(1, 2)
    out = value_output(partial.flatten(), lse.flatten(), 2, weight, torch.empty(1, 1, 16, dtype=torch.float16))
    assert torch.equal(out, torch.full_like(out, 512.0))


def test_where_it_is_used() -> None:
    weight = value_weight(8, 256, torch.float16)
    assert values_fuse(8, 32, weight)
    assert values_fuse(module.MOST_ROWS, 2, weight)
    assert not values_fuse(module.MOST_ROWS + 1, 2, weight)
    assert not values_fuse(8, 1, weight), "without splits there is nothing to combine"
    assert not values_fuse(8, 32, weight.contiguous()), "a weight of another layout is cuBLAS's"
    assert not values_fuse(8, 32, value_weight(8, 40, torch.float16))
    assert [value_columns(rows, 256) for rows in (8, 9, 16)] == [16, 32, 32]
    assert value_columns(16, 48) == 16


def test_what_does_not_fit_is_refused() -> None:
    partial, lse = torch.zeros(2 * 512), torch.zeros(2)
    weight, out = value_weight(1, 32, torch.float32), torch.empty(1, 1, 32)
    for wrong, words in (
        ((partial, lse, 3, weight, out), "parts do not fit"),
        ((partial, lse, 2, weight.contiguous(), out), "lie in memory"),
        ((partial, lse, 2, weight[:, :, :16], out), "weight must be"),
        ((partial, lse, 2, weight, torch.empty(1, 1, 64)[..., ::2]), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            value_output(*wrong)
