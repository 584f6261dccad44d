"""One weight or two times a batch: y[M, N] = x[M, K] W[N, K]^T, a weight read once a tile of BM tokens.

The product is taken as W x^T, so that weights, unpacked in registers, are the tensor cores' left operand and the few
tokens their right one. Programs may split K between them; the last one to arrive at a tile adds the parts in order, so
the sum does not depend on timing. Letters: M tokens, N outputs, K inputs; BN, BM the tile.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.quants.ahead import ask_ahead
from glm5deploy.quants.launch import MOST_PARTS as _MOST_PARTS
from glm5deploy.quants.scales import DENSE, group_scale, group_tiles, has_minimum, load_scales
from glm5deploy.quants.tile_product import add_super, load_x
from glm5deploy.quants.unpack import excess, load_codes, weight_tile

MOST_PARTS = tl.constexpr(_MOST_PARTS)


@triton.jit
def arrive(ticket, ARRIVALS):
    """Publish this program's stores and count it at a ticket; true for the last of ARRIVALS, which resets it."""
    tl.debug_barrier()  # all threads' stores come before this program's ticket
    last = tl.atomic_add(ticket, 1, sem="acq_rel") == ARRIVALS - 1
    tl.debug_barrier()
    if last:
        tl.store(ticket, 0)
    return last


@triton.jit
def add_parts(at, stride, ok, PARTS):
    """Sum of the at most MOST_PARTS parts stored at ``at`` + part * stride, in order; all are asked for at once."""
    count = tl.where(ok, PARTS, 0)
    parts = ()
    for p in tl.static_range(MOST_PARTS):
        parts = parts + (tl.load(at + p * stride, mask=count > p, other=0.0, cache_modifier=".cg"),)
    total = parts[0]
    for p in tl.static_range(1, MOST_PARTS):
        total += parts[p]
    return total


@triton.jit
def multiply_tile(
    x, low, high, words, halves, y, parts, width, ticket, i_m, i_n, part, M, N, K, x_stride, y_stride, SUPERS, PARTS,
    FMT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One part of K of tile (i_m, i_n) of y, and all of the tile where it is the last part to arrive at ``ticket``.

    parts fp32 [PARTS, M, width], from this weight's first column on.
    """
    first, last = part * SUPERS // PARTS, (part + 1) * SUPERS // PARTS
    ask_ahead(low, high, words, halves, first, last, i_n * BN, N, BN, FMT, CHAINED)
    wait_for_previous(CHAINED)
    m = (i_m * BM + tl.arange(0, BM)).to(tl.int64)
    n = i_n * BN + tl.arange(0, BN)
    n_in = tl.minimum(n, N - 1)
    m_ok = m < M
    acc = tl.zeros([BN, BM], tl.float32)
    for sb in tl.range(first, last, num_stages=STAGES):
        xs = load_x(x + m * x_stride, sb, m_ok, K, EVEN, PTX, LATE)
        acc = add_super(acc, xs, low, high, words, halves, sb, n_in, N, FMT, EVEN, PTX, LATE, LATE)
    let_next_begin(CHAINED)
    ok = m_ok[None, :] & (n[:, None] < N)
    at = y + m[None, :] * y_stride + n[:, None]
    if PARTS == 1:
        tl.store(at, acc.to(y.dtype.element_ty), mask=ok)
    else:
        stride = M.to(tl.int64) * width
        p_part = parts + m[None, :] * width + n[:, None]
        tl.store(p_part + part * stride, acc, mask=ok, cache_modifier=".cg")
        if arrive(ticket, PARTS):
            tl.store(at, add_parts(p_part, stride, ok, PARTS).to(y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M", "SUPERS", "PARTS", "y_stride"])
def linear_kernel(
    x, low, high, words, halves, y, parts, tickets, M, N, K, x_stride, y_stride, SUPERS, PARTS,
    FMT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, LATE: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (M tiles, N tiles, PARTS). parts fp32 [PARTS, M, N]; tickets int32 [tiles], zero between launches."""
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    ticket = tickets + i_n * tl.num_programs(0) + i_m
    multiply_tile(
        x, low, high, words, halves, y, parts, N, ticket, i_m, i_n, tl.program_id(2),
        M, N, K, x_stride, y_stride, SUPERS, PARTS, FMT, BN, BM, STAGES, LATE, EVEN, PTX, CHAINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "SUPERS", "PARTS", "y_stride"])
def pair_kernel(
    x, al, ah, aw, a_s, bl, bh, bw, bs, y, parts, tickets, M, NA, NB, K, x_stride, y_stride, SUPERS, PARTS,
    A: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Two weights of NA and NB outputs, of types A and B, side by side in y: the first programs take the first.

    Grid (M tiles, N tiles of both, PARTS). parts fp32 [PARTS, M, NA + NB]; tickets as in ``linear_kernel``.
    """
    i_m, i_n, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ticket = tickets + i_n * tl.num_programs(0) + i_m
    tiles = tl.cdiv(NA, BN)
    first = i_n < tiles
    if A == B:
        # One body for both: two would be given shared memory of their own.
        at = tl.where(first, 0, NA)
        multiply_tile(
            x, tl.where(first, al, bl), tl.where(first, ah, bh), tl.where(first, aw, bw), tl.where(first, a_s, bs),
            y + at, parts + at, NA + NB, ticket, i_m, i_n - tl.where(first, 0, tiles), part, M, tl.where(first, NA, NB),
            K, x_stride, y_stride, SUPERS, PARTS, A, BN, BM, STAGES, False, EVEN, PTX, CHAINED,
        )  # fmt: skip
    elif first:
        multiply_tile(
            x, al, ah, aw, a_s, y, parts, NA + NB, ticket, i_m, i_n, part,
            M, NA, K, x_stride, y_stride, SUPERS, PARTS, A, BN, BM, STAGES, False, EVEN, PTX, CHAINED,
        )  # fmt: skip
    else:
        multiply_tile(
            x, bl, bh, bw, bs, y + NA, parts + NA, NA + NB, ticket, i_m, i_n - tiles, part,
            M, NB, K, x_stride, y_stride, SUPERS, PARTS, B, BN, BM, STAGES, False, EVEN, PTX, CHAINED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["N", "n0", "n1"])
def dense_kernel(
    low, high, words, halves, out, N, n0, n1, K,
    FMT: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows n0 to n1 of a weight in bf16, as products see it: out [n1 - n0, K]. Grid (super-blocks, rows / BN)."""
    sb, i_n = tl.program_id(0), tl.program_id(1)
    n = n0 + i_n * BN + tl.arange(0, BN)
    n_in = tl.minimum(n, N - 1)
    codes = load_codes(low, high, sb, n_in, N, FMT)
    scales = load_scales(words, halves, sb, n_in, N, FMT)
    for i in tl.static_range(16):
        w = weight_tile(codes, i, FMT, PTX).to(tl.float32)
        if FMT[3] != DENSE:
            s, least = group_scale(scales, i // group_tiles(FMT[3]), FMT, PTX)
            w = (w - excess(FMT)) * s[:, None]
            if has_minimum(FMT[3]):
                w -= (least * 128.0)[:, None]
        k = sb * 256 + 16 * i + tl.arange(0, 16)
        at = out + (n[:, None] - n0).to(tl.int64) * K + k[None, :]
        ok = n[:, None] < n1
        tl.store(at, w.to(out.dtype.element_ty), mask=ok if EVEN else ok & (k[None, :] < K))
