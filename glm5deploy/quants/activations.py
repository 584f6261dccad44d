"""Activations in fp16 for products with integers (integer_tile.py): scaled by a row's power of two.

bf16 has more exponents than fp16. A row times the power of two that brings its largest number into [2^9, 2^10) keeps
all eight bits of what is up to 2^22 times smaller, and of what is smaller still loses less than 2^-30 of the largest.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.quants.moe_kernel import sort_expert


@triton.jit
def _fit_rows(block, x, fitted, sums, scales, R, K, x_stride, ROWS: tl.constexpr, SUPERS: tl.constexpr):
    """ROWS rows of ``fit_kernel``, the block-th so many."""
    r = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None, None]
    s = tl.arange(0, SUPERS)[None, :, None]
    k = tl.arange(0, 256)[None, None, :]
    at = s * 256 + k
    ok = (row < R) & (at < K)
    b_x = tl.load(x + row * x_stride + at, mask=ok, other=0.0).to(tl.float32)
    exponent = tl.max(tl.max(tl.abs(b_x), 2), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 10)  # both powers of two are normal numbers, of a row of zeros as well
    up = ((263 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + r, ((exponent - 9) << 23).to(tl.float32, bitcast=True), mask=r < R)
    sixteenth = tl.where((k & 16) != 0, 0.0625, 1.0)
    b_fit = (b_x * up[:, None, None] * sixteenth).to(tl.float16)
    tl.store(fitted + row * K + at, b_fit, mask=ok)
    b_sum = tl.sum(tl.reshape(b_fit.to(tl.float32) / sixteenth, [ROWS, SUPERS, 16, 16]), 3)
    b_high = b_sum.to(tl.float16)
    p_sums = sums + row * (K // 8) + s * 32 + tl.arange(0, 16)[None, None, :]
    ok = (row < R) & (s * 256 < K)
    tl.store(p_sums, b_high, mask=ok)
    tl.store(p_sums + 16, (b_sum - b_high.to(tl.float32)).to(tl.float16), mask=ok)


@triton.jit(do_not_specialize=["R"])
def fit_kernel(
    x, fitted, sums, scales, R, K, x_stride, ROWS: tl.constexpr, SUPERS: tl.constexpr, CHAINED: tl.constexpr
):
    """Rows of x [R, K] as fp16 ``fitted`` [R, K], tiles of 16 with an odd number a sixteenth. Grid (R / ROWS).

    sums fp16 [R, K / 256, 32]: of a super-block's sixteen tiles, then what rounding these to fp16 took off.
    scales fp32 [R]: what undoes a row's scaling. SUPERS: K / 256 or the next power of two.
    """
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    _fit_rows(tl.program_id(0), x, fitted, sums, scales, R, K, x_stride, ROWS, SUPERS)


@triton.jit(do_not_specialize=["P", "R"])
def sort_fit_kernel(
    ids, order, work, P, E, x, fitted, sums, scales, R, K, x_stride,
    BM: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SUPERS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``sort_kernel`` and ``fit_kernel`` beside each other. Grid (E + R / ROWS)."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    if tl.program_id(0) < E:
        sort_expert(tl.program_id(0), ids, order, work, P, E, BM, CHUNK)
    else:
        _fit_rows(tl.program_id(0) - E, x, fitted, sums, scales, R, K, x_stride, ROWS, SUPERS)
