"""Routed experts of sorted pairs as products with integers: gate, up and SiLU; down and router weight.

As moe_kernel.py's two kernels, whose letters these are, with the same work items (``sort_kernel``): at most BM pairs of
one expert. N is a multiple of 16 and at least BN; a last tile of rows begins earlier, repeating some of the one before.
"""

# Gluon reads these functions: branches on constants need their else, comparisons their plain form.
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.quants.integer_memory import (
    accumulator,
    add_scaled,
    add_super,
    add_tile,
    after,
    bring_weights,
    bring_x,
    load_scales,
    sums_layout,
    weight_memory,
    weights_at,
    x_layout,
    x_memory,
    x_tile,
)
from glm5deploy.quants.linear_kernel import add_parts, arrive


@gluon.jit
def work_item(work, item):
    """Expert, first place in ``order``, and pairs of a work item."""
    return gl.load(work + item * 3), gl.load(work + item * 3 + 1), gl.load(work + item * 3 + 2)


@gluon.jit
def item_rows(order, first, count, BM: gl.constexpr, LAYOUT: gl.constexpr):
    """A work item's pairs, int32 [BM]; the first pair of all where there is none."""
    m = gl.arange(0, BM, LAYOUT)
    return gl.load(order + first + m, mask=m < count, other=0)


@gluon.jit
def store_pairs(to, values, order, first, count, n0, N, WARPS: gl.constexpr):
    """Rows n0 and on of a work item's outputs: values [BN, BM] to [P, N], whole sectors at a time."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    BN: gl.constexpr = values.shape[0]
    BM: gl.constexpr = values.shape[1]
    SLICE: gl.constexpr = gl.SliceLayout(0, OUT)
    pairs = item_rows(order, first, count, BM, SLICE).to(gl.int64)
    at = to + (pairs * N)[None, :] + (n0 + gl.arange(0, BN, gl.SliceLayout(1, OUT)))[:, None]
    values = gl.convert_layout(values.to(to.dtype.element_ty), OUT)
    gl.store(at, values, mask=(gl.arange(0, BM, SLICE) < count)[None, :])


@gluon.jit
def _store_hidden(hidden, gate, up, scales, order, first, count, n0, N, TOPK: gl.constexpr, WARPS: gl.constexpr):
    SLICE: gl.constexpr = gl.SliceLayout(0, accumulator(WARPS))
    scale = gl.load(scales + item_rows(order, first, count, gate.shape[1], SLICE) // TOPK)[None, :]
    gate = gate * scale
    store_pairs(hidden, gate / (1.0 + gl.exp(-gate)) * (up * scale), order, first, count, n0, N, WARPS)


@gluon.jit(do_not_specialize=["P", "SUPERS", "PARTS"])
def integer_gate_up_kernel(
    x, sums, scales, g_low, g_high, g_words, g_halves, u_low, u_high, u_words, u_halves, order, work, hidden, parts,
    tickets, P, N, SUPERS, PARTS,
    G: gl.constexpr, U: gl.constexpr, TOPK: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """hidden [P, N] = silu(gate x) * up x; x, sums, scales: a row a token (activations.py).

    parts fp32 [PARTS, P, 2N], pairs as sorted; tickets int32 [P, N tiles], zero. Grid (N tiles, items, PARTS).
    """
    wait_for_previous(CHAINED)
    e, first, count = work_item(work, gl.program_id(1))
    if count == 0:
        return
    part = gl.program_id(2)
    begin = part * SUPERS // PARTS
    steps = (part + 1) * SUPERS // PARTS - begin
    n0 = gl.minimum(gl.program_id(0) * BN, N - BN)
    gates = weight_memory(BN, STAGES, G)
    ups = weight_memory(BN, STAGES, U)
    xs = x_memory(BM, STAGES)
    g_planes = weights_at((g_low, g_high, g_words, g_halves), e * SUPERS + begin, n0, N, G)
    u_planes = weights_at((u_low, u_high, u_words, u_halves), e * SUPERS + begin, n0, N, U)
    rows = item_rows(order, first, count, BM, gl.SliceLayout(1, x_layout(WARPS))) // TOPK
    sums_rows = item_rows(order, first, count, BM, gl.SliceLayout(1, sums_layout(WARPS))) // TOPK
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            bring_weights(gates, g_planes, i, i, 0, N, G, BN, WARPS)
            bring_weights(ups, u_planes, i, i, 0, N, U, BN, WARPS)
            bring_x(xs, x, sums, rows, sums_rows, count, i, begin + i, SUPERS, WARPS)
        async_copy.commit_group()
    ACC: gl.constexpr = accumulator(WARPS)
    gate = gl.zeros([BN, BM], gl.float32, ACC)
    up = gl.zeros([BN, BM], gl.float32, ACC)
    slot = 0
    free = STAGES - 1
    for sb in range(steps):
        async_copy.wait_group(STAGES - 2)
        gl.barrier()  # all copies to ``slot`` are there, and all warps are done with ``free``
        ahead = sb + STAGES - 1
        if ahead < steps:
            bring_weights(gates, g_planes, free, ahead, 0, N, G, BN, WARPS)
            bring_weights(ups, u_planes, free, ahead, 0, N, U, BN, WARPS)
            bring_x(xs, x, sums, rows, sums_rows, count, free, begin + ahead, SUPERS, WARPS)
        async_copy.commit_group()
        g_scales, g_least = load_scales(gates, slot, G, WARPS)
        u_scales, u_least = load_scales(ups, slot, U, WARPS)
        g_total = gl.zeros([BN, BM], gl.float32, ACC)
        u_total = gl.zeros([BN, BM], gl.float32, ACC)
        for i in gl.static_range(16):
            b_x = x_tile(xs, slot, i, WARPS)
            g_total = add_tile(g_total, gates, g_scales, b_x, slot, i, G, WARPS)
            u_total = add_tile(u_total, ups, u_scales, b_x, slot, i, U, WARPS)
        gate = add_scaled(gate, g_total, gates, g_least, xs, slot, slot, G, WARPS)
        up = add_scaled(up, u_total, ups, u_least, xs, slot, slot, U, WARPS)
        slot = after(slot, STAGES)
        free = after(free, STAGES)
    let_next_begin(CHAINED)
    if PARTS == 1:
        _store_hidden(hidden, gate, up, scales, order, first, count, n0, N, TOPK, WARPS)
    else:
        m = gl.arange(0, BM, gl.SliceLayout(0, ACC))
        stride = P.to(gl.int64) * (2 * N)
        p_part = parts + ((first + m).to(gl.int64) * (2 * N))[None, :]
        p_part += (n0 + gl.arange(0, BN, gl.SliceLayout(1, ACC)))[:, None]
        ok = (m < count)[None, :]
        gl.store(p_part + part * stride, gate, mask=ok, cache_modifier=".cg")
        gl.store(p_part + (part * stride + N), up, mask=ok, cache_modifier=".cg")
        if arrive(tickets + first * gl.num_programs(0) + gl.program_id(0), PARTS):
            gate = add_parts(p_part, stride, ok, PARTS)
            up = add_parts(p_part + N, stride, ok, PARTS)
            _store_hidden(hidden, gate, up, scales, order, first, count, n0, N, TOPK, WARPS)


@gluon.jit(do_not_specialize=["TILES"])
def integer_down_kernel(
    x, sums, scales, low, high, words, halves, order, work, weights, terms, N, TILES,
    FMT: gl.constexpr, SUPERS: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr, CHAINED: gl.constexpr,
):  # fmt: skip
    """terms [P, N] = weight * (down x); x, sums, scales: a row a pair. Grid (spans of TILES * BN outputs, items)."""
    wait_for_previous(CHAINED)
    e, first, count = work_item(work, gl.program_id(1))
    if count == 0:
        return
    let_next_begin(CHAINED)
    n0 = gl.program_id(0) * (TILES * BN)
    steps = gl.minimum(TILES, (N - n0 + BN - 1) // BN) * SUPERS
    memory = weight_memory(BN, STAGES, FMT)
    xs = x_memory(BM, SUPERS)
    planes = weights_at((low, high, words, halves), e * SUPERS, 0, N, FMT)
    rows = item_rows(order, first, count, BM, gl.SliceLayout(1, x_layout(WARPS)))
    sums_rows = item_rows(order, first, count, BM, gl.SliceLayout(1, sums_layout(WARPS)))
    for s in gl.static_range(SUPERS):
        bring_x(xs, x, sums, rows, sums_rows, count, s, s, SUPERS, WARPS)
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            bring_weights(
                memory, planes, i, i % SUPERS, gl.minimum(n0 + i // SUPERS * BN, N - BN), N, FMT, BN, WARPS
            )  # fmt: skip
        async_copy.commit_group()
    ACC: gl.constexpr = accumulator(WARPS)
    pairs = item_rows(order, first, count, BM, gl.SliceLayout(0, ACC))
    share = (gl.load(scales + pairs) * gl.load(weights + pairs).to(gl.float32))[None, :]
    slot = 0
    free = STAGES - 1
    for t in range(steps // SUPERS):
        acc = gl.zeros([BN, BM], gl.float32, ACC)
        for s in gl.static_range(SUPERS):
            async_copy.wait_group(STAGES - 2)
            gl.barrier()  # all copies to ``slot`` are there, and all warps are done with ``free``
            ahead = t * SUPERS + s + STAGES - 1
            if ahead < steps:
                n = gl.minimum(n0 + ahead // SUPERS * BN, N - BN)
                bring_weights(memory, planes, free, ahead % SUPERS, n, N, FMT, BN, WARPS)
            async_copy.commit_group()
            acc = add_super(acc, memory, xs, slot, s, FMT, WARPS)
            slot = after(slot, STAGES)
            free = after(free, STAGES)
        store_pairs(terms, acc * share, order, first, count, gl.minimum(n0 + t * BN, N - BN), N, WARPS)
