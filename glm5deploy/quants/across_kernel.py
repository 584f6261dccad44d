"""Products for one token, K spread over the warps of a program: no parts, no counters, one launch a layer of experts.

A program takes BN outputs and all of K. Its E *entries* are super-blocks that are multiplied at the same time, one a
warp: the tensor cores' batch. All copies of a program are under way before it first waits for one, and the warps' sums
are added at the end. Entries may lie in different rows of x, experts or weights, which gives gate and up in one
program, and down with the sum over a token's experts.
The token's column is repeated eight times, as the tensor cores want eight. What excess, offset and minimum add is a
multiple of each group's sum of x, as in tile_product.py, but summed apart, every group's once: a second product of the
same x would have it moved through shared memory.
Letters: E entries, N outputs, K inputs, G groups of a super-block; BN outputs of a program.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.quants.early import let_next, wait_for_previous, wait_in_loop
from glm5deploy.quants.scales import group_scale, group_scales, group_tiles, has_minimum
from glm5deploy.quants.tile_product import load_super
from glm5deploy.quants.unpack import excess, weight_tile


@triton.jit
def _load_columns(x, row, k, ok, K, EVEN: tl.constexpr):
    """A tile of the entries' super-blocks of x, [E, 16, 8]: one column, repeated."""
    at = k + tl.arange(0, 16)[None, :]
    found = tl.load(x + row + at, mask=ok if EVEN else ok & (at < K), other=0.0)
    return tl.broadcast_to(tl.expand_dims(found, -1), [found.shape[0], 16, 8])


@triton.jit
def _group_sums(x, row, k, ok, K, G: tl.constexpr, EVEN: tl.constexpr):
    """fp32 [E, G]: sums of x over the groups of the entries' super-blocks."""
    WIDTH: tl.constexpr = 256 // G
    inner = (tl.arange(0, G) * WIDTH)[None, :, None] + tl.arange(0, WIDTH)[None, None, :]
    at = tl.expand_dims(k, -1) + inner
    mask = tl.expand_dims(ok, -1)
    found = tl.load(x + tl.expand_dims(row, -1) + at, mask=mask if EVEN else mask & (at < K), other=0.0)
    return tl.sum(found.to(tl.float32), 2)


@triton.jit
def add_entries(
    acc, rest, state, x, row, k, ok, K, step,
    FMT: tl.constexpr, WAIT: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """acc [E, BN, 8] and rest [E, BN, G] += each entry's super-block times its part of x.

    The product is acc's first column and all of rest, summed. row, k [E, 1]: where the entry's row of x begins, and the
    entry in it; ok [E, 1], whether it counts. WAIT: launches ahead have still to be waited for, in step ``step``.
    """
    codes, scales = state
    TILES: tl.constexpr = group_tiles(FMT[3])
    G: tl.constexpr = 16 // TILES
    wide = x
    if WAIT:
        wide, x = wait_in_loop(x, step)
    for g in tl.static_range(G):
        found = tl.zeros(acc.shape, tl.float32)
        for t in tl.static_range(TILES):
            columns = _load_columns(wide, row, k + 16 * (g * TILES + t), ok, K, EVEN)
            tile = weight_tile(codes, g * TILES + t, FMT, PTX)
            found = tl.dot(tile, columns if PTX else columns.to(tl.float32), found, input_precision="ieee")
        s, _ = group_scale(scales, g, FMT, PTX)
        acc += tl.expand_dims(s, -1) * found
    if excess(FMT) > 0:
        s, least = group_scales(scales, G, FMT)
        each = s * -excess(FMT)
        if has_minimum(FMT[3]):
            each -= least
        rest += each * tl.expand_dims(_group_sums(x, row, k, ok, K, G, EVEN), 1)
    return acc, rest


@triton.jit
def _sums(acc, rest):
    """[E, BN]: what ``add_entries`` summed for each entry."""
    first = tl.arange(0, 8)[None, None, :] == 0
    return tl.sum(tl.where(first, acc, 0.0), 2) + tl.sum(rest, 2)


@triton.jit
def _rows(
    x, low, high, words, halves, y, i_n, N, K, SUPERS,
    FMT: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Outputs i_n * BN and on of one weight."""
    n = i_n * BN + tl.arange(0, BN)
    n_in = tl.minimum(n, N - 1)[None, :]
    acc = tl.zeros([E, BN, 8], tl.float32)
    rest = tl.zeros([E, BN, 16 // group_tiles(FMT[3])], tl.float32)
    for first in tl.range(0, SUPERS, E, num_stages=STAGES):
        sb = (first + tl.arange(0, E))[:, None]
        state = load_super(low, high, words, halves, sb, n_in, N, FMT)
        acc, rest = add_entries(acc, rest, state, x, sb * 0, sb * 256, sb < SUPERS, K, first, FMT, EARLY, EVEN, PTX)
    tl.store(y + n, tl.sum(_sums(acc, rest), 0).to(y.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["SUPERS"])
def linear_across_kernel(
    x, al, ah, aw, a_s, bl, bh, bw, bs, y, NA, NB, K, SUPERS,
    A: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """y [NA + NB] = x [K] times one weight (B is (): NB is 0), or two, side by side. SUPERS is a multiple of E.

    Grid (NA / BN + NB / BN, each rounded up).
    """
    let_next(EARLY)
    i_n = tl.program_id(0)
    if len(B) == 0:
        _rows(x, al, ah, aw, a_s, y, i_n, NA, K, SUPERS, A, BN, E, STAGES, EARLY, EVEN, PTX)
    else:
        tiles = tl.cdiv(NA, BN)
        if i_n < tiles:
            _rows(x, al, ah, aw, a_s, y, i_n, NA, K, SUPERS, A, BN, E, STAGES, EARLY, EVEN, PTX)
        else:
            _rows(x, bl, bh, bw, bs, y + NA, i_n - tiles, NB, K, SUPERS, B, BN, E, STAGES, EARLY, EVEN, PTX)


@triton.jit
def _either(choice, first, second):
    """Pointers [E, 1]: first where ``choice`` is 0, second where it is 1. Planes are aligned to 16 bytes."""
    BYTES: tl.constexpr = first.dtype.element_ty.primitive_bitwidth // 8
    apart = (second.to(tl.int64) - first.to(tl.int64)) // BYTES
    return first + choice * tl.multiple_of(apart, 16 // BYTES)


@triton.jit(do_not_specialize=["SUPERS"])
def gate_up_across_kernel(
    x, gl, gh, gw, gs, ul, uh, uw, us, ids, hidden, N, K, SUPERS,
    FMT: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """hidden [TOPK, N] = silu(gate x) * up x for one token's experts; rows of ids < 0 stay unwritten.

    Gate and up are of one type; the upper half of the entries are up's. Grid (N / BN, TOPK).
    """
    let_next(EARLY)
    zero = wait_for_previous(EARLY)
    slot = tl.program_id(1)
    expert = tl.load(ids + zero + slot).to(tl.int32)
    if expert >= 0:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        n_in = tl.minimum(n, N - 1)[None, :]
        entry = tl.arange(0, E)[:, None]
        is_up = entry // (E // 2)
        low, high = _either(is_up, gl, ul), _either(is_up, gh, uh)
        words, halves = _either(is_up, gw, uw), _either(is_up, gs, us)
        acc = tl.zeros([E, BN, 8], tl.float32)
        rest = tl.zeros([E, BN, 16 // group_tiles(FMT[3])], tl.float32)
        for first in tl.range(0, SUPERS, E // 2, num_stages=STAGES):
            sb = first + entry % (E // 2)
            state = load_super(low, high, words, halves, expert * SUPERS + sb, n_in, N, FMT)
            acc, rest = add_entries(
                acc, rest, state, x + zero, sb * 0, sb * 256, sb < SUPERS, K, first, FMT, False, EVEN, PTX
            )
        found = _sums(acc, rest)
        gate = tl.sum(tl.where(is_up == 0, found, 0.0), 0)
        up = tl.sum(tl.where(is_up == 1, found, 0.0), 0)
        at = hidden + slot * N + n
        tl.store(at, (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["SUPERS"])
def down_across_kernel(
    hidden, low, high, words, halves, ids, weights, out, N, K, SUPERS,
    FMT: tl.constexpr, TOPK: tl.constexpr, BN: tl.constexpr, E: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """out [N] = sum over one token's experts of weight * (down hidden); ids < 0 have no part in it.

    Of each expert E / TOPK super-blocks are taken at a time. Grid (N / BN).
    """
    let_next(EARLY)
    zero = wait_for_previous(EARLY)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = tl.minimum(n, N - 1)[None, :]
    entry = tl.arange(0, E)
    slot = entry // (E // TOPK)
    expert = tl.load(ids + zero + slot).to(tl.int32)
    share = tl.where(expert >= 0, tl.load(weights + zero + slot).to(tl.float32), 0.0)
    before = (tl.maximum(expert, 0) * SUPERS)[:, None]
    here = (expert >= 0)[:, None]
    acc = tl.zeros([E, BN, 8], tl.float32)
    rest = tl.zeros([E, BN, 16 // group_tiles(FMT[3])], tl.float32)
    for first in tl.range(0, SUPERS, E // TOPK, num_stages=STAGES):
        sb = first + (entry % (E // TOPK))[:, None]
        state = load_super(low, high, words, halves, before + sb, n_in, N, FMT)
        acc, rest = add_entries(
            acc, rest, state, hidden + zero, (slot * K)[:, None], sb * 256, here & (sb < SUPERS), K, first,
            FMT, False, EVEN, PTX,
        )  # fmt: skip
    total = tl.sum(tl.expand_dims(share, -1) * _sums(acc, rest), 0)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < N)
