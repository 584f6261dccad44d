"""Interleaved RoPE, a device function."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton


@triton.jit
def rotate_pairs(b_even, b_odd, b_cos, b_sin):
    """Both halves of adjacent pairs of values, rotated; fp32, not rounded."""
    return b_even * b_cos - b_odd * b_sin, b_odd * b_cos + b_even * b_sin
