"""Activations in fp16: nothing of a bf16 row that counts is lost, whatever its size; sums are those of its tiles."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants import integer_products
from glm5deploy.quants.moe_kernel import sort_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIXTEENTHS = torch.tensor([1.0, 16.0], device=DEVICE)[:, None]


def whole(fitted: torch.Tensor) -> torch.Tensor:
    """fp64 [R, K]: what the fitted rows stand for before their scale."""
    rows, columns = fitted.shape
    return (fitted.double().reshape(rows, -1, 2, 16) * SIXTEENTHS).reshape(rows, columns)


def rows_of_all_sizes(columns: int) -> torch.Tensor:
    """bf16: ordinary rows, one of zeros, tiny and huge ones, and one with numbers of very different size."""
    torch.manual_seed(3)
    x = torch.randn(6, columns, device=DEVICE)
    x *= torch.tensor([1.0, 0.0, 1e-30, 1e30, 3e38 / 8, 1.0], device=DEVICE)[:, None]
    x[5] *= torch.exp(4 * torch.randn(columns, device=DEVICE))
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("columns", [256, 768, 2048])
def test_a_row_keeps_its_bits(columns: int) -> None:
    x = rows_of_all_sizes(columns)
    fitted, sums, scales = integer_products.fit(x)
    back = whole(fitted) * scales.double()[:, None]
    largest = x.double().abs().amax(1, keepdim=True)
    near = x.double().abs() * 2.0**22 >= largest  # all bits of these
    assert torch.equal(back[near], x.double()[near])
    assert ((back - x.double()).abs() <= largest * 2.0**-30).all()
    assert fitted.isfinite().all()
    mantissa, _ = torch.frexp(scales)
    assert (mantissa == 0.5).all(), "scales are powers of two"
    tiles = whole(fitted).reshape(len(x), -1, 16, 16).sum(-1)
    found = sums.double().reshape(len(x), -1, 2, 16).sum(2)
    assert (found - tiles).abs().max() <= tiles.abs().max() * 2.0**-20


def test_what_is_no_number_stays_none() -> None:
    """Silence would turn it into a plausible answer."""
    x = torch.ones(2, 256, device=DEVICE, dtype=torch.bfloat16)
    x[0, 7], x[1, 100] = float("inf"), float("nan")
    fitted, _, scales = integer_products.fit(x)
    assert not (whole(fitted) * scales.double()[:, None]).sum(1).isfinite().any()


def test_sorting_and_fitting_together_is_both() -> None:
    torch.manual_seed(4)
    x = torch.randn(9, 512, device=DEVICE).to(torch.bfloat16)
    ids = torch.randint(-1, 5, (9, 3), dtype=torch.int32, device=DEVICE)
    (order, work), fitted = integer_products.sort_and_fit(x, ids, 5, 2)
    expected = torch.zeros_like(order), torch.zeros_like(work)
    sort_kernel[(5,)](ids, *expected, ids.numel(), 5, BM=2, CHUNK=1024, CHAINED=False, num_warps=4)
    there = int((ids >= 0).sum())
    assert torch.equal(order[:there], expected[0][:there])
    assert torch.equal(work, expected[1])
    for mine, theirs in zip(fitted, integer_products.fit(x), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_may_lie_apart() -> None:
    """Activations are sometimes a part of wider rows."""
    x = torch.randn(4, 1024, device=DEVICE).to(torch.bfloat16)
    for mine, theirs in zip(
        integer_products.fit(x[:, 256:512]), integer_products.fit(x[:, 256:512].contiguous()), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_what_would_be_silently_wrong_is_refused() -> None:
    """fp32 would lose bits that the other products keep; places beyond int32 would be others' rows."""
    with pytest.raises(ValueError, match="not in torch"):
        integer_products.fit(torch.zeros(1, 256, device=DEVICE))
    long = torch.empty(1 << 23, 256, dtype=torch.bfloat16, device="meta")
    for refused in (lambda: integer_products.fit(long), lambda: integer_products.sort_and_fit(long, long, 8, 8)):
        with pytest.raises(ValueError, match="more than"):
            refused()
