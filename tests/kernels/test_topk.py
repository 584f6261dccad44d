"""The top-k kernel against the reference, which it must equal position by position."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels import reference
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements


def check(
    logits: torch.Tensor, lengths: list[int], k: int, block: int, starts: list[int] | None = None, width: int = 0
) -> None:
    rows = len(lengths)
    longest = max(width, *lengths)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    first = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    out = torch.empty(rows, k + 3, dtype=torch.int32)
    workspace = torch.empty(topk_workspace_elements(rows, longest, k, block), dtype=torch.int32)
    select_topk(logits, sizes, k, longest, out, workspace, first, block)
    assert torch.equal(out[:, :k], reference.select_topk(logits, sizes, k, first))
    assert (out[:, k:] == -77).all(), "columns past k are not the kernel's"


def test_rows_within_one_block() -> None:
    check(torch.randn(5, 200), [0, 1, 33, 128, 200], k=33, block=256)


def test_more_rounds_for_longer_rows() -> None:
    # 500 columns: 8 blocks leave 8 * 20, 3 blocks leave 3 * 20, which fit one.
    check(torch.randn(4, 500), [500, 64, 65, 190], k=20, block=64)


def test_launches_for_longer_rows_than_there_are() -> None:
    check(torch.randn(2, 150), [150, 20], k=16, block=64, width=640)


@pytest.mark.parametrize("block", [64, 256])
def test_ties_go_to_the_lower_position_within_and_across_blocks(block: int) -> None:
    logits = torch.randint(-1, 2, (2, 150)).float()
    logits[1] = 0.0
    logits[1, ::3] = -0.0
    check(logits, [150, 150], k=31, block=block)


def test_infinities_and_nan() -> None:
    logits = torch.randn(3, 90)
    logits[0, 10:80] = -torch.inf
    logits[1, 20:60] = torch.nan
    logits[2, 5:50] = torch.inf
    check(logits, [90, 90, 90], k=40, block=128)


def test_values_across_the_whole_range_of_fp32() -> None:
    logits = torch.randn(2, 120) * torch.logspace(-38, 38, 120)
    logits[1] = torch.arange(120) * 1e-45
    check(logits, [120, 119], k=17, block=128)


def test_neighbouring_values_are_told_apart() -> None:
    logits = (1.0 + torch.randperm(100) * 2**-23)[None]
    check(logits, [100], k=50, block=128)


def test_rows_may_start_anywhere() -> None:
    check(torch.randn(3, 150), [80, 0, 130], k=12, block=64, starts=[61, 150, 20])


def test_limits_are_named() -> None:
    out = torch.empty(1, 64, dtype=torch.int32)
    lengths = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="k must be"):
        select_topk(torch.zeros(1, 64), lengths, 40, 64, out, block=64)
    with pytest.raises(ValueError, match="workspace"):
        select_topk(torch.zeros(1, 100), lengths, 20, 100, out, block=64)
    with pytest.raises(ValueError, match="fp32"):
        select_topk(torch.zeros(1, 64).double(), lengths, 20, 64, out, block=64)
