"""Routed experts in three launches: gate, up and SiLU; down and router weight; the sum over a token's experts.

A *pair* is one of a token's experts: pair p = token * TOPK + slot. A program takes an expert's weights for a tile of
outputs and all of that expert's pairs, BM at a time, so a weight is read once however many tokens want it. With few
pairs a program finds its expert's pairs itself (no launch before it); with many, ``sort_kernel`` has sorted them.
Letters: T tokens, P pairs, E experts, N outputs, K inputs; BN, BM the tile.
"""

# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.quants.linear_kernel import add_parts, arrive
from glm5deploy.quants.tile_product import add_span, add_super, load_super, load_x, x_tile


@triton.jit
def sort_expert(e, ids, order, work, P, E, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Expert e's share of ``sort_kernel``."""
    smaller = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for q0 in range(0, P, CHUNK):  # added up between threads once, behind the loop
        q = q0 + tl.arange(0, CHUNK)
        found = tl.load(ids + q, mask=q < P, other=-1)
        smaller += ((found >= 0) & (found < e)).to(tl.int32)
        equal += (found == e).to(tl.int32)
    before = tl.sum(smaller)
    mine = tl.sum(equal)
    last = tl.where(e == E - 1, P, before + mine) // BM
    for c in range(before // BM, last + 1):
        done = (c - before // BM) * BM
        tl.store(work + (e + c) * 3, e)
        tl.store(work + (e + c) * 3 + 1, before + done)
        tl.store(work + (e + c) * 3 + 2, tl.minimum(tl.maximum(mine - done, 0), BM))
    at = before
    for q0 in range(0, P, CHUNK):
        q = q0 + tl.arange(0, CHUNK)
        same = (tl.load(ids + q, mask=q < P, other=-1) == e).to(tl.int32)
        tl.store(order + at + tl.cumsum(same) - 1, q, mask=same == 1)
        at += tl.sum(same)


@triton.jit(do_not_specialize=["P"])
def sort_kernel(ids, order, work, P, E, BM: tl.constexpr, CHUNK: tl.constexpr, CHAINED: tl.constexpr):
    """Pairs by expert, cut into chunks of at most BM pairs of one expert. Grid (E); ids < 0 are left out.

    order int32 [P]; work int32 [E + P // BM, 3]: expert, first place in ``order``, pairs (0: nothing to do). Expert
    e's chunks start at entry e + before // BM, where ``before`` pairs have smaller ids: all entries are written once.
    """
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    sort_expert(tl.program_id(0), ids, order, work, P, E, BM, CHUNK)


@triton.jit
def pairs_here(ids, p, P, PAIRS: tl.constexpr, BM: tl.constexpr):
    """Pairs [BM] of pair p's expert from p on, how many [0...BM], and the expert. None unless p heads a run of BM."""
    q = tl.arange(0, PAIRS)
    expert = tl.load(ids + p).to(tl.int32)
    same = (tl.load(ids + q, mask=q < P, other=-1) == expert).to(tl.int32)
    rank = tl.sum(tl.where(q < p, same, 0))
    count = tl.where((expert >= 0) & (rank % BM == 0), tl.minimum(tl.sum(same) - rank, BM), 0)
    place = tl.cumsum(same) - 1 - rank
    hit = (place[None, :] == tl.arange(0, BM)[:, None]) & (same[None, :] == 1)
    return tl.sum(tl.where(hit, q[None, :], 0), 1), count, expert


@triton.jit
def pairs_sorted(order, work, item, BM: tl.constexpr):
    """Pairs [BM] of a chunk, how many, and the expert."""
    expert = tl.load(work + item * 3)
    first = tl.load(work + item * 3 + 1)
    count = tl.load(work + item * 3 + 2)
    m = tl.arange(0, BM)
    return tl.load(order + first + m, mask=m < count, other=0), count, expert


@triton.jit
def pairs_of(ids, order, work, item, P, PAIRS: tl.constexpr, BM: tl.constexpr):
    """What this program has to do: searched for among PAIRS (a power of two) pairs, or, if PAIRS is 0, sorted.

    One token's pairs (PAIRS is 1) have nothing to find: each is alone with its expert.
    """
    if PAIRS == 1:
        expert = tl.load(ids + item).to(tl.int32)
        return item + tl.zeros([BM], tl.int32), tl.where(expert >= 0, 1, 0), expert
    elif PAIRS > 0:
        return pairs_here(ids, item, P, PAIRS, BM)
    else:
        return pairs_sorted(order, work, item, BM)


@triton.jit
def gate_up_tile(
    x, gl, gh, gw, gs, ul, uh, uw, us, hidden, parts, tickets, tokens, pairs, count, e, P, N, ROWS, UP, K, x_stride,
    SUPERS, PARTS, G: tl.constexpr, U: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``gate_up_kernel`` for ``count`` pairs [BM] of expert e: ``tokens`` rows of x to ``pairs`` rows of hidden.

    Planes have ROWS rows, of which gate's begin at 0 and up's at UP.
    """
    part = tl.program_id(2)
    i_n = tl.program_id(0)
    n = i_n * BN + tl.arange(0, BN)
    n_in = tl.minimum(n, N - 1)
    m_ok = tl.arange(0, BM) < count
    rows = x + tokens.to(tl.int64) * x_stride
    first = e * SUPERS  # planes of all experts are consecutive super-blocks
    gate = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for sb in tl.range(part * SUPERS // PARTS, (part + 1) * SUPERS // PARTS, num_stages=STAGES):
        xs = load_x(rows, sb, m_ok, K, EVEN, PTX, False)
        g_state = load_super(gl, gh, gw, gs, first + sb, n_in, ROWS, G, False)
        u_state = load_super(ul, uh, uw, us, first + sb, UP + n_in, ROWS, U, False)
        for h in tl.static_range(8):  # both at once, so that what they share of x lives briefly
            x0 = x_tile(xs, 2 * h, EVEN, PTX, False)
            x1 = x_tile(xs, 2 * h + 1, EVEN, PTX, False)
            gate = add_span(gate, g_state, x0, x1, h, G, PTX, False)
            up = add_span(up, u_state, x0, x1, h, U, PTX, False)
    let_next_begin(CHAINED)
    ok = m_ok[None, :] & (n[:, None] < N)
    at = hidden + pairs[None, :].to(tl.int64) * N + n[:, None]
    if PARTS == 1:
        tl.store(at, (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty), mask=ok)
    else:
        stride = P.to(tl.int64) * 2 * N
        p_part = parts + pairs[None, :].to(tl.int64) * (2 * N) + n[:, None]
        tl.store(p_part + part * stride, gate, mask=ok, cache_modifier=".cg")
        tl.store(p_part + part * stride + N, up, mask=ok, cache_modifier=".cg")
        head = tl.sum(tl.where(tl.arange(0, BM) == 0, pairs, 0))
        if arrive(tickets + head * tl.num_programs(0) + i_n, PARTS):
            gate = add_parts(p_part, stride, ok, PARTS)
            up = add_parts(p_part + N, stride, ok, PARTS)
            tl.store(at, (gate * tl.sigmoid(gate) * up).to(hidden.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["P", "SUPERS", "PARTS"])
def gate_up_kernel(
    x, gl, gh, gw, gs, ul, uh, uw, us, ids, order, work, hidden, parts, tickets, P, N, K, x_stride, SUPERS, PARTS,
    G: tl.constexpr, U: tl.constexpr, TOPK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """hidden [P, N] = silu(gate x) * up x. parts fp32 [PARTS, P, 2N]; tickets int32 [P, N tiles], zero.

    Grid (N tiles, P, PARTS) where pairs are searched for, (N tiles, work items, PARTS) where they are sorted.
    """
    wait_for_previous(CHAINED)
    pairs, count, e = pairs_of(ids, order, work, tl.program_id(1), P, PAIRS, BM)
    if count > 0:
        gate_up_tile(
            x, gl, gh, gw, gs, ul, uh, uw, us, hidden, parts, tickets, pairs // TOPK, pairs, count, e, P, N, N, 0, K,
            x_stride, SUPERS, PARTS, G, U, BN, BM, STAGES, EVEN, PTX, CHAINED,
        )  # fmt: skip


@triton.jit
def pair_weights(weights, pairs, count, BM: tl.constexpr):
    """fp32 [BM]."""
    return tl.load(weights + pairs, mask=tl.arange(0, BM) < count, other=0.0).to(tl.float32)


@triton.jit
def down_tile(
    hidden, low, high, words, halves, share, terms, pairs, count, e, N, K, SUPERS, TILES,
    FMT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    ONE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``down_kernel`` for ``count`` pairs [BM] of expert e, whose weights are ``share``, fp32 [BM]."""
    let_next_begin(CHAINED)  # a launch of few programs
    m_ok = tl.arange(0, BM) < count
    wide = pairs.to(tl.int64)
    rows = hidden + wide * K
    first = e * SUPERS
    xs = load_x(rows, 0, m_ok, K, EVEN, PTX, False)
    for t in tl.range(0, TILES, num_stages=STAGES):
        n = (tl.program_id(0) * TILES + t) * BN + tl.arange(0, BN)
        n_in = tl.minimum(n, N - 1)
        acc = tl.zeros([BN, BM], tl.float32)
        if ONE:
            acc = add_super(acc, xs, low, high, words, halves, first, n_in, N, FMT, EVEN, PTX, False, False)
        else:
            for sb in tl.range(0, SUPERS, num_stages=STAGES):
                more = load_x(rows, sb, m_ok, K, EVEN, PTX, False)
                acc = add_super(acc, more, low, high, words, halves, first + sb, n_in, N, FMT, EVEN, PTX, False, False)
        at = terms + wide[None, :] * N + n[:, None]
        tl.store(at, (acc * share[None, :]).to(terms.dtype.element_ty), mask=m_ok[None, :] & (n[:, None] < N))


@triton.jit(do_not_specialize=["P", "SUPERS", "TILES"])
def down_kernel(
    hidden, low, high, words, halves, ids, order, work, weights, terms, P, N, K, SUPERS, TILES,
    FMT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """terms [P, N] = weight * (down hidden), for ``sum_kernel``. ONE: SUPERS is 1, and hidden units are read once.

    Grid (spans of TILES * BN outputs, P or work items), as in ``gate_up_kernel``.
    """
    wait_for_previous(CHAINED)
    pairs, count, e = pairs_of(ids, order, work, tl.program_id(1), P, PAIRS, BM)
    if count > 0:
        share = pair_weights(weights, pairs, count, BM)
        down_tile(
            hidden, low, high, words, halves, share, terms, pairs, count, e, N, K, SUPERS, TILES,
            FMT, BN, BM, STAGES, ONE, EVEN, PTX, CHAINED,
        )  # fmt: skip


@triton.jit
def sum_kernel(
    terms, ids, also, out, N, TOPK: tl.constexpr, BN: tl.constexpr, ALSO: tl.constexpr, CHAINED: tl.constexpr
):
    """out [T, N] = sum of a token's terms [TOPK, N], in the order of slots; pairs without an expert have none.

    Grid (T, N / BN). ALSO: the sum begins with ``also`` [T, N].
    """
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    pair = tl.program_id(0).to(tl.int64) * TOPK
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    if ALSO:
        at = also + tl.program_id(0).to(tl.int64) * N + n
        total = tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    for s in tl.static_range(TOPK):
        end = tl.where(tl.load(ids + pair + s) >= 0, N, 0)
        total += tl.load(terms + (pair + s) * N + n, mask=n < end, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0).to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=n < N)
