"""A super-block of weights times activations, scaled in the accumulator: the inner loop that all products share.

A group's weights are scale * (code - offset) - minimum. Codes are exact in bf16, so the tensor cores sum
code * x of a group without rounding a weight, and scale and minimum, exact in fp32, multiply that sum:

    W x = sum over groups of scale * (sum of code * x - offset * sum of x) - minimum * sum of x

Tiles hold code + excess (see unpack.py), so each group's sum starts at -excess * sum of x, a product with a constant
that minima use as well. A matrix is taken as W x^T: weights are the left operand, the few tokens the right one.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.quants.scales import DENSE, group_scale, group_tiles, has_minimum, load_scales
from glm5deploy.quants.unpack import excess, load_codes, weight_tile


@triton.jit
def load_x(rows, sb, m_ok, K, EVEN: tl.constexpr, PTX: tl.constexpr):
    """Sixteen x^T tiles [16, BM] of super-block sb; rows: pointers [BM] to the tokens' inputs."""
    tiles = ()
    for i in tl.static_range(16):
        k = sb * 256 + 16 * i + tl.arange(0, 16)
        ok = m_ok[None, :] if EVEN else m_ok[None, :] & (k[:, None] < K)
        x = tl.load(rows[None, :] + k[:, None], mask=ok, other=0.0)
        tiles = tiles + (x if PTX else x.to(tl.float32),)
    return tiles


@triton.jit
def load_super(low, high, words, halves, sb, n, N, FMT: tl.constexpr):
    """Codes and scales of super-block sb of rows n, packed, for ``add_span``; sb counts experts before as well."""
    return load_codes(low, high, sb, n, N, FMT), load_scales(words, halves, sb, n, N, FMT)


@triton.jit
def _add_group(acc, codes, scales, x0, x1, I: tl.constexpr, COUNT: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """acc += a group's COUNT tiles, from tile I on, times x0 (and x1)."""
    EXCESS: tl.constexpr = excess(FMT)
    MINIMUM: tl.constexpr = has_minimum(FMT[3])
    tile = weight_tile(codes, I, FMT, PTX)
    s, least = group_scale(scales, I // COUNT, FMT, PTX)
    if EXCESS > 0:
        constant = tl.full(tile.shape, -EXCESS, tile.dtype)
        less = tl.dot(constant, x0, input_precision="ieee")
        if COUNT == 2:
            less = tl.dot(constant, x1, less, input_precision="ieee")
    if EXCESS > 0 and not MINIMUM:
        found = tl.dot(tile, x0, less, input_precision="ieee")
    else:
        found = tl.dot(tile, x0, input_precision="ieee")
    if COUNT == 2:
        found = tl.dot(weight_tile(codes, I + 1, FMT, PTX), x1, found, input_precision="ieee")
    acc += tl.expand_dims(s, -1) * found
    if MINIMUM:  # the sums of x are needed twice; the tensor cores would overwrite them
        acc += tl.expand_dims(s + least, -1) * less
    return acc


@triton.jit
def add_span(acc, state, x0, x1, H: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """acc[BN, BM] += weights 32 H and on of a super-block's rows times x^T, whose tiles are x0 and x1."""
    codes, scales = state
    if FMT[3] == DENSE:
        acc = tl.dot(weight_tile(codes, 2 * H, FMT, PTX), x0, acc, input_precision="ieee")
        return tl.dot(weight_tile(codes, 2 * H + 1, FMT, PTX), x1, acc, input_precision="ieee")
    elif group_tiles(FMT[3]) == 2:
        return _add_group(acc, codes, scales, x0, x1, 2 * H, 2, FMT, PTX)
    else:
        acc = _add_group(acc, codes, scales, x0, x0, 2 * H, 1, FMT, PTX)
        return _add_group(acc, codes, scales, x1, x1, 2 * H + 1, 1, FMT, PTX)


@triton.jit
def add_super(acc, xs, low, high, words, halves, sb, n, N, FMT: tl.constexpr, PTX: tl.constexpr):
    """acc[BN, BM] += W[n, super-block sb] x^T, with the sixteen x^T tiles of ``load_x``."""
    state = load_super(low, high, words, halves, sb, n, N, FMT)
    for h in tl.static_range(8):
        acc = add_span(acc, state, xs[2 * h], xs[2 * h + 1], h, FMT, PTX)
    return acc
