"""Rows of every kind that decides about bins, lists and ties of the top-k kernels."""

from __future__ import annotations

import torch


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
