"""The norm between two parts of a layer, against the reference."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.add_norm import add_norm, add_norm_reference

EPS = 1e-5


def inputs(tokens: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, residual = torch.randn(tokens, width), 3 * torch.randn(tokens, width)
    return x.to(dtype), residual.to(dtype), (1 + torch.rand(width)).to(dtype)


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    ("tokens", "width", "parts", "warps"),
    [
        (1, 6144, 8, 8),
        (3, 6144, 4, 16),
        (2, 6144, 1, 4),
        (5, 200, 8, 8),
        (2, 1000, 3, 4),
        (33, 8, 8, 8),
        (1, 4097, 8, 8),
    ],
)
def test_rows_are_added_and_normed(tokens: int, width: int, parts: int, warps: int, add: bool) -> None:
    """Over poisoned fresh memory; inputs are left alone."""
    x, residual, weight = inputs(tokens, width, torch.float32)
    before = x.clone(), residual.clone()
    given = residual if add else None
    out, total = add_norm(x, given, weight, EPS, parts, warps)
    expected, sums = add_norm_reference(x, given, weight, EPS)
    torch.testing.assert_close(out, expected)
    assert torch.equal(total, sums)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rows_do_not_touch_each_other() -> None:
    """A row of NaN beside others, whose numbers are the same in any company and in any parts."""
    x, residual, weight = inputs(4, 1000, torch.float32)
    x[2] = torch.nan
    out, total = add_norm(x, residual, weight, EPS)
    assert out[2].isnan().all()
    assert total[2].isnan().all()
    for row in (0, 1, 3):
        alone = add_norm(x[row : row + 1], residual[row : row + 1], weight, EPS, parts=3)
        assert torch.equal(out[row], alone[0][0])
        assert torch.equal(total[row], alone[1][0])


def test_the_sum_is_rounded_before_it_is_normed() -> None:
    """In fp16, 2048 + 1 is 2048: all numbers of a row are the same then, and 1 when normed."""
    x, residual = torch.ones(1, 64).half(), torch.full((1, 64), 2048.0).half()
    x[:, ::4] = 0
    weight = torch.full((64,), 1.5).half()
    out, total = add_norm(x, residual, weight, 0.0)
    assert torch.equal(total, residual)
    assert torch.equal(out, torch.full_like(out, 1.5))


def test_half_precision_is_rounded_once_behind_the_weight() -> None:
    x, residual, weight = inputs(5, 512, torch.float16)
    out, total = add_norm(x, residual, weight, EPS)
    expected, sums = add_norm_reference(x, residual, weight, EPS)
    assert torch.equal(total, sums)
    # The order of a sum is the kernel's own: a number that falls on the other side of a tie is a unit away.
    torch.testing.assert_close(out, expected, rtol=2**-10, atol=0)
    assert (out == expected).float().mean() > 0.99
    wide = sums.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    twice = unit.half() * weight
    assert (out == twice).float().mean() < 0.9


def test_what_does_not_fit_is_refused() -> None:
    x, residual, weight = inputs(2, 64, torch.float32)
    for wrong, words in (
        ((x, residual, weight[:32], EPS), "weight must be"),
        ((x, residual[:1], weight, EPS), "residual must be"),
        ((x, residual.half(), weight, EPS), "one type"),
        ((x[:, ::2], None, weight[:32], EPS), "contiguous"),
    ):
        with pytest.raises(ValueError, match=words):
            add_norm(*wrong)
    out, total = add_norm(x[:0], residual[:0], weight, EPS)
    assert out.shape == total.shape == (0, 64)
