"""The product of few rows with a small weight, against torch."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.row_product import MOST_TOKENS, row_product


@pytest.mark.parametrize(
    ("tokens", "outputs", "width", "warps"),
    [(1, 12, 6144, 8), (2, 6, 6144, 4), (3, 7, 1000, 8), (5, 1, 200, 8), (8, 20, 4097, 16), (7, 33, 8, 8)],
)
def test_rows_are_multiplied(tokens: int, outputs: int, width: int, warps: int) -> None:
    """Over poisoned fresh memory, rows and weights with poison on both sides."""
    x, weight = torch.full((tokens + 2, width), torch.nan), torch.full((outputs + 2, width), torch.nan)
    x[1:-1], weight[1:-1] = torch.randn(tokens, width), torch.randn(outputs, width)
    out = row_product(x[1:-1], weight[1:-1], warps)
    expected = (x[1:-1].double() @ weight[1:-1].double().T).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-4)


def test_a_token_is_the_same_in_any_company() -> None:
    x, weight = torch.randn(MOST_TOKENS, 300), torch.randn(10, 300)
    x[3] = torch.nan
    out = row_product(x, weight)
    assert out[3].isnan().all()
    for row in (0, 2, 7):
        torch.testing.assert_close(out[row], row_product(x[row : row + 1], weight)[0], rtol=1e-5, atol=1e-5)


def test_half_precision_is_rounded_once() -> None:
    """2048 + 63 lies between two numbers of fp16, of which 2112 is the even one; sums in fp16 would stay at 2048."""
    weight = torch.ones(4, 64).half()
    x = torch.ones(1, 64).half()
    x[0, 0] = 2048
    assert row_product(x, weight).tolist() == [[2112.0] * 4]


def test_logits_of_a_router_are_of_its_weights_type() -> None:
    """A weight of 1 + 2^-12 is none of fp16; the sum, 64 of them, is no number of it either."""
    logits = row_product(torch.ones(2, 64).half(), torch.full((4, 64), 1 + 2**-12))
    assert logits.dtype == torch.float32
    assert logits.tolist() == [[64 + 2**-6] * 4] * 2


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(2, 64), torch.randn(4, 64)
    for wrong, words in (
        ((x, weight[:, :32]), "weight must be"),
        ((x, weight.half()), "of x's type, torch.float32, or fp32"),
        ((x[:, ::2], weight[:, :32]), "contiguous"),
        ((torch.randn(MOST_TOKENS + 1, 64), weight), "at most"),
    ):
        with pytest.raises(ValueError, match=words):
            row_product(*wrong)
    assert row_product(x[:0], weight).shape == (0, 4)
