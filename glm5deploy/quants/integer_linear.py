"""A weight of many rows times a batch as a product with integers: y[M, N] = x[M, K] W[N, K]^T.

As linear_kernel.py, whose letters these are. N is a multiple of 16 and at least BN; a last tile of rows begins earlier
and repeats some of the one before, in memory for parts of its own.
"""

# Gluon reads these functions: branches on constants need their else, comparisons their plain form.
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.quants.integer_memory import (
    accumulator,
    add_super,
    after,
    bring_weights,
    bring_x,
    sums_layout,
    weight_memory,
    weights_at,
    x_layout,
    x_memory,
)
from glm5deploy.quants.linear_kernel import add_parts, arrive


@gluon.jit(do_not_specialize=["M", "SUPERS", "PARTS"])
def integer_linear_kernel(
    x, sums, scales, low, high, words, halves, y, parts, tickets, M, N, y_stride, SUPERS, PARTS,
    FMT: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """Grid (M tiles, N tiles, PARTS). parts fp32 [M tiles, N tiles, PARTS, BM, BN]; tickets int32 a tile, zero."""
    m0 = gl.program_id(0) * BM
    n0 = gl.minimum(gl.program_id(1) * BN, N - BN)
    part = gl.program_id(2)
    begin = part * SUPERS // PARTS
    steps = (part + 1) * SUPERS // PARTS - begin
    memory = weight_memory(BN, STAGES, FMT)
    xs = x_memory(BM, STAGES)
    planes = weights_at((low, high, words, halves), begin, n0, N, FMT)
    rows = gl.minimum(m0 + gl.arange(0, BM, gl.SliceLayout(1, x_layout(WARPS))), M - 1)
    sums_rows = gl.minimum(m0 + gl.arange(0, BM, gl.SliceLayout(1, sums_layout(WARPS))), M - 1)
    wait_for_previous(CHAINED)
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            bring_weights(memory, planes, i, i, 0, N, FMT, BN, WARPS)
            bring_x(xs, x, sums, rows, sums_rows, M - m0, i, begin + i, SUPERS, WARPS)
        async_copy.commit_group()
    ACC: gl.constexpr = accumulator(WARPS)
    acc = gl.zeros([BN, BM], gl.float32, ACC)
    slot = 0
    free = STAGES - 1
    for sb in range(steps):
        async_copy.wait_group(STAGES - 2)
        gl.barrier()  # all copies to ``slot`` are there, and all warps are done with ``free``
        ahead = sb + STAGES - 1
        if ahead < steps:
            bring_weights(memory, planes, free, ahead, 0, N, FMT, BN, WARPS)
            bring_x(xs, x, sums, rows, sums_rows, M - m0, free, begin + ahead, SUPERS, WARPS)
        async_copy.commit_group()
        acc = add_super(acc, memory, xs, slot, slot, FMT, WARPS)
        slot = after(slot, STAGES)
        free = after(free, STAGES)
    let_next_begin(CHAINED)
    m = m0 + gl.arange(0, BM, gl.SliceLayout(0, ACC))
    n = gl.arange(0, BN, gl.SliceLayout(1, ACC))
    scale = gl.load(scales + gl.minimum(m, M - 1))[None, :]
    at = y + (m.to(gl.int64) * y_stride)[None, :] + (n0 + n)[:, None]
    ok = (m < M)[None, :]
    if PARTS == 1:
        gl.store(at, (acc * scale).to(y.dtype.element_ty), mask=ok)
    else:
        tile = gl.program_id(0) * gl.num_programs(1) + gl.program_id(1)
        o_part = (gl.arange(0, BM, gl.SliceLayout(0, ACC)) * BN)[None, :] + n[:, None]
        p_part = parts + tile.to(gl.int64) * (PARTS * BM * BN) + o_part
        gl.store(p_part + part * (BM * BN), acc, mask=ok, cache_modifier=".cg")
        if arrive(tickets + tile, PARTS):
            acc = add_parts(p_part, BM * BN, ok, PARTS)
            gl.store(at, (acc * scale).to(y.dtype.element_ty), mask=ok)
