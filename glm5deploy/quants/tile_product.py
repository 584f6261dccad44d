"""A super-block of weights times activations, scaled in the accumulator: the inner loop that all products share.

A group's weights are scale * (code - offset) - minimum. Codes are exact in bf16, so the tensor cores sum
code * x of a group without rounding a weight, and scale and minimum, exact in fp32, multiply that sum:

    W x = sum over groups of scale * (sum of code * x - offset * sum of x) - minimum * sum of x

Tiles hold code + excess (see unpack.py), so each group's sum starts at -excess * sum of x, a product with a constant
that minima use as well. A matrix is taken as W x^T: weights are the left operand, the few tokens the right one.

Scales pass between threads through shared memory, group by group, and no read of shared memory moves across such an
exchange. What is loaded before the first one therefore stays in registers: codes and activations of a super-block, 255
registers for 16 tokens. LATE loads each where it is multiplied: 110 to 180 suffice, and more programs are resident.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505, RUF005
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.quants.scales import DENSE, group_scale, group_tiles, has_minimum, load_scales
from glm5deploy.quants.unpack import excess, load_codes, load_part, part_tile


@triton.jit
def _load_tile(rows, sb, I: tl.constexpr, m_ok, K, EVEN: tl.constexpr, PTX: tl.constexpr):
    k = sb * 256 + 16 * I + tl.arange(0, 16)
    ok = m_ok[None, :] if EVEN else m_ok[None, :] & (k[:, None] < K)
    x = tl.load(rows[None, :] + k[:, None], mask=ok, other=0.0)
    return x if PTX else x.to(tl.float32)


@triton.jit
def load_x(rows, sb, m_ok, K, EVEN: tl.constexpr, PTX: tl.constexpr, LATE: tl.constexpr):
    """Sixteen x^T tiles [16, BM] of super-block sb, for ``x_tile``; rows: pointers [BM] to the tokens' inputs.

    LATE: only where they are.
    """
    if LATE:
        return rows, sb, m_ok, K
    else:
        tiles = ()
        for i in tl.static_range(16):
            tiles = tiles + (_load_tile(rows, sb, i, m_ok, K, EVEN, PTX),)
        return tiles


@triton.jit
def x_tile(xs, I: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, LATE: tl.constexpr):
    """Tile I [16, BM] of ``load_x``."""
    if LATE:
        rows, sb, m_ok, K = xs
        return _load_tile(rows, sb, I, m_ok, K, EVEN, PTX)
    else:
        return xs[I]


@triton.jit
def load_super(low, high, words, halves, sb, n, N, FMT: tl.constexpr, LATE: tl.constexpr):
    """Codes and scales of super-block sb of rows n, packed, for ``add_span``; sb counts experts before as well.

    LATE: only where the codes are.
    """
    if LATE:
        return (low, high, sb, n, N), load_scales(words, halves, sb, n, N, FMT)
    else:
        return load_codes(low, high, sb, n, N, FMT), load_scales(words, halves, sb, n, N, FMT)


@triton.jit
def _span_parts(codes, H: tl.constexpr, FMT: tl.constexpr, LATE: tl.constexpr):
    """Parts of the low plane with tiles 2 H and 2 H + 1, one and the same but for dense types; of the high plane."""
    FIRST: tl.constexpr = 2 * H * FMT[0] // 16
    SECOND: tl.constexpr = (2 * H + 1) * FMT[0] // 16
    HIGH: tl.constexpr = 2 * H * FMT[1] // 16
    if LATE:
        low, high, sb, n, N = codes
        w = load_part(low, sb, n, N, FIRST, FMT[0])
        v = w
        if SECOND > FIRST:
            v = load_part(low, sb, n, N, SECOND, FMT[0])
        return w, v, (load_part(high, sb, n, N, HIGH, FMT[1]) if FMT[1] > 0 else w)
    else:
        return codes[FIRST], codes[SECOND], codes[FMT[0] + HIGH if FMT[1] > 0 else FIRST]


@triton.jit
def _add_group(acc, w, h, scales, x0, x1, I: tl.constexpr, COUNT: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr):
    """acc += a group's COUNT tiles, from tile I on, times x0 (and x1); w, h: the parts that hold them."""
    EXCESS: tl.constexpr = excess(FMT)
    MINIMUM: tl.constexpr = has_minimum(FMT[3])
    tile = part_tile(w, h, I, FMT, PTX)
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
        found = tl.dot(part_tile(w, h, I + 1, FMT, PTX), x1, found, input_precision="ieee")
    acc += tl.expand_dims(s, -1) * found
    if MINIMUM:  # the sums of x are needed twice; the tensor cores would overwrite them
        acc += tl.expand_dims(s + least, -1) * less
    return acc


@triton.jit
def add_span(acc, state, x0, x1, H: tl.constexpr, FMT: tl.constexpr, PTX: tl.constexpr, LATE: tl.constexpr):
    """acc[BN, BM] += weights 32 H and on of a super-block's rows times x^T, whose tiles are x0 and x1."""
    codes, scales = state
    w, v, h = _span_parts(codes, H, FMT, LATE)
    if FMT[3] == DENSE:
        acc = tl.dot(part_tile(w, w, 2 * H, FMT, PTX), x0, acc, input_precision="ieee")
        return tl.dot(part_tile(v, v, 2 * H + 1, FMT, PTX), x1, acc, input_precision="ieee")
    elif group_tiles(FMT[3]) == 2:
        return _add_group(acc, w, h, scales, x0, x1, 2 * H, 2, FMT, PTX)
    else:
        acc = _add_group(acc, w, h, scales, x0, x0, 2 * H, 1, FMT, PTX)
        return _add_group(acc, w, h, scales, x1, x1, 2 * H + 1, 1, FMT, PTX)


@triton.jit
def add_super(
    acc, xs, low, high, words, halves, sb, n, N,
    FMT: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, X_LATE: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """acc[BN, BM] += W[n, super-block sb] x^T, with what ``load_x`` gave for X_LATE."""
    state = load_super(low, high, words, halves, sb, n, N, FMT, LATE)
    for h in tl.static_range(8):
        x0 = x_tile(xs, 2 * h, EVEN, PTX, X_LATE)
        x1 = x_tile(xs, 2 * h + 1, EVEN, PTX, X_LATE)
        acc = add_span(acc, state, x0, x1, h, FMT, PTX, LATE)
    return acc
