"""Rows of every kind that decides about bins, lists and ties of the top-k kernels."""

from __future__ import annotations

import torch

# Of scratch memory: as a number 8e37, which would be among the best wherever it was taken for one.
POISON = 0x7E7E7E7E


def awkward_rows(width: int, device: str = "cpu") -> torch.Tensor:
    """fp32 [13, width]."""
    position = torch.arange(width, device=device)
    rows = torch.randn(13, width, device=device)
    rows[1] = rows[1].round()
    rows[2] = 0.0
    rows[2, ::3] = -0.0
    rows[3] = position
    rows[4] = -position
    rows[5, 30:] = torch.nan
    rows[6, 30:] = -torch.inf
    rows[7] *= torch.logspace(-38, 38, width, device=device)
    rows[8, ::2] = torch.inf
    rows[9, width - width // 30 :] += 10.0
    rows[10] = position * 1e-45
    rows[11] = 1.0 + torch.randperm(width, device=device) * 2**-23
    rows[12] = torch.where(rows[12] > 0.0, torch.nan, rows[12])
    return rows


def deceiving_rows(width: int, device: str = "cpu") -> torch.Tensor:
    """fp32 [8, width]: a sample of four times 32 neighbours of them promises what the row does not hold."""
    rows = torch.randn(8, width, device=device)
    seen = torch.zeros(width, dtype=torch.bool, device=device)
    for part in range(4):
        start = part * (width - 32) // 3
        seen[start : start + 32] = True
    rows[0] = torch.where(seen, rows[0] - 100.0, rows[0])  # the best are above the range
    rows[1] = torch.where(seen, rows[1] + 100.0, rows[1])  # below
    rows[2] = torch.where(seen, rows[2] * 1e30, rows[2])  # all in one bin
    rows[3] = torch.where(seen, 0.5, rows[3])  # no range at all
    rows[4] = -rows[4].abs() - 1e-3
    rows[5] = torch.where(seen, torch.nan, rows[5])
    rows[6] = rows[6] * 1e-40 * (1.0 - 2.0 * seen)  # denormals
    rows[7] = torch.where(rows[7] > 1.0, 3.0e38, -3.0e38)  # a range that overflows
    return rows


def close_rows(width: int, k: int, device: str = "cpu") -> torch.Tensor:
    """fp32 [6, width], k < width: numbers around the k-th best that are equal or nearly so; one has few values."""
    rows = torch.randn(6, width, device=device)
    order = rows.argsort(dim=1, descending=True)
    around = slice(max(0, k - 15), k + 15)
    kth = rows[1:3].gather(1, order[1:3, k - 1 : k])
    rows[0, order[0, around]] = 0.25
    rows[1, order[1, k]] = torch.nextafter(kth[0], torch.zeros_like(kth[0]) - 9.0).squeeze()
    steps = torch.arange(len(order[2, around]), device=device, dtype=torch.float32)
    rows[2, order[2, around]] = kth[1] * (1.0 - steps * 2.0**-22)
    rows[3, order[3, : k + 15]] = 5.0
    rows[4] = torch.arange(width, device=device) % 29
    # One of two near it is beside it, so in the same thread.
    at = int(order[5, k - 1])
    rows[5, at - 1 if at % 2 else min(at + 1, width - 1)] = rows[5, at] - 6e-5
    rows[5, (at + width // 2) % width] = rows[5, at] + 3e-5
    return rows
