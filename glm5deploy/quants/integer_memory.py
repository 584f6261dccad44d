"""Shared memory of the products with integers: a super-block of planes and of activations, brought ahead by copies.

One program has STAGES buffers. A copy of the planes is one instruction for all parts, so that none waits for another.
Activations: activations.py.
"""

# Gluon reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: E741, RET505
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from glm5deploy.quants.integer_text import shrink
from glm5deploy.quants.integer_tile import integer_tile, minimum_tile
from glm5deploy.quants.scales import X4, half_count, has_minimum, scale_bytes, word_count


@gluon.constexpr_function
def accumulator(warps):
    """Layout of sums [BN, BM]: warps lie along the rows, so that each takes its own weights."""
    return gl.NVMMADistributedLayout([2, 0], [warps, 1], [16, 8])


@gluon.constexpr_function
def operand(index, warps):
    """Layout of a product's left (0) or right (1) operand."""
    return gl.DotOperandLayout(index, accumulator(warps), 2)


@gluon.jit
def weight_memory(BN: gl.constexpr, STAGES: gl.constexpr, FMT: gl.constexpr):
    """For BN rows: low and high plane int16 [STAGES, parts * BN, 16], words int32 [STAGES, 4, BN].

    And halves int16 [STAGES, 1 or 2, BN]. Where there is no high plane, the low one stands in.
    """
    CODES: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    low = gl.allocate_shared_memory(gl.int16, [STAGES, FMT[0] * BN, 16], CODES)
    high = low
    if FMT[1] > 0:
        high = gl.allocate_shared_memory(gl.int16, [STAGES, FMT[1] * BN, 16], CODES)
    words = gl.allocate_shared_memory(gl.int32, [STAGES, 4, BN], PLAIN)
    halves = gl.allocate_shared_memory(gl.int16, [STAGES, half_count(FMT[3]), BN], PLAIN)
    return low, high, words, halves


@gluon.jit
def x_memory(BM: gl.constexpr, COUNT: gl.constexpr):
    """COUNT super-blocks of BM rows of activations [COUNT, BM, 256] and their sums [COUNT, BM, 32]."""
    x = gl.allocate_shared_memory(gl.float16, [COUNT, BM, 256], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    sums = gl.allocate_shared_memory(gl.float16, [COUNT, BM, 32], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    return x, sums


@gluon.jit
def weights_at(planes, before, n0, N, FMT: gl.constexpr):
    """Planes from row n0 of super-block ``before`` on, of all experts' that follow each other."""
    low, high, words, halves = planes
    rows = before.to(gl.int64) * N
    return (
        low + rows * (16 * FMT[0]) + n0 * 16,
        high + rows * (16 * FMT[1]) + n0 * 16,
        words + rows * word_count(FMT[3]) + n0,
        halves + rows * half_count(FMT[3]) + n0,
    )


@gluon.jit
def _bring_codes(memory, plane, rows, N, BITS: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr):
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
    r = gl.arange(0, BITS * BN, gl.SliceLayout(1, COPY))[:, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, COPY))[None, :]
    at = (r // BN * N + r % BN) * 16 + j
    async_copy.async_load(memory, plane + (at + rows * (16 * BITS)))


@gluon.jit
def bring_weights(
    memory, planes, slot, sb, n, N, FMT: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Ask for super-block sb of rows n to n + BN, counted from where ``planes`` are (weights_at)."""
    low, high, words, halves = memory
    rows = sb * N
    _bring_codes(low.index(slot), planes[0] + n * 16, rows, N, FMT[0], BN, WARPS)
    if FMT[1] > 0:
        _bring_codes(high.index(slot), planes[1] + n * 16, rows, N, FMT[1], BN, WARPS)
    W: gl.constexpr = word_count(FMT[3])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    w = gl.arange(0, 4, gl.SliceLayout(1, WORDS))[:, None]
    at = N * w + gl.arange(0, BN, gl.SliceLayout(0, WORDS))[None, :]
    async_copy.async_load(words.index(slot), planes[2] + n + (at + rows * W), mask=w < W)
    H: gl.constexpr = half_count(FMT[3])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    at = N * gl.arange(0, H, gl.SliceLayout(1, HALVES))[:, None] + gl.arange(0, BN, gl.SliceLayout(0, HALVES))[None, :]
    async_copy.async_load(halves.index(slot), planes[3] + n + (at + rows * H))


@gluon.constexpr_function
def x_layout(warps):
    return gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])


@gluon.constexpr_function
def sums_layout(warps):
    return gl.BlockedLayout([1, 8], [8, 4], [warps, 1], [1, 0])


@gluon.jit
def bring_x(memory, x, sums, rows, sums_rows, count, slot, sb, SUPERS, WARPS: gl.constexpr):
    """Ask for super-block sb of the first ``count`` of rows of x and sums.

    rows, sums_rows int32 [BM]: which, in the layouts' slices along the columns.
    """
    X: gl.constexpr = x_layout(WARPS)
    S: gl.constexpr = sums_layout(WARPS)
    BM: gl.constexpr = rows.shape[0]
    at = (rows * (SUPERS * 256))[:, None] + gl.arange(0, 256, gl.SliceLayout(0, X))[None, :] + sb * 256
    ok = gl.arange(0, BM, gl.SliceLayout(1, X))[:, None] < count
    async_copy.async_load(memory[0].index(slot), x + at, mask=ok)
    at = (sums_rows * (SUPERS * 32))[:, None] + gl.arange(0, 32, gl.SliceLayout(0, S))[None, :] + sb * 32
    ok = gl.arange(0, BM, gl.SliceLayout(1, S))[:, None] < count
    async_copy.async_load(memory[1].index(slot), sums + at, mask=ok)


@gluon.jit
def x_tile(memory, slot, I: gl.constexpr, WARPS: gl.constexpr):
    """x^T of tile I, fp16 [16, BM]."""
    return memory[0].index(slot).slice(16 * I, 16, 1).permute((1, 0)).load(operand(1, WARPS))


@gluon.jit
def load_scales(memory, slot, FMT: gl.constexpr, WARPS: gl.constexpr):
    """What ``scale_bytes`` gives, each row's where its weights are."""
    A: gl.constexpr = operand(0, WARPS)
    W: gl.constexpr = word_count(FMT[3])
    words = memory[2].index(slot).permute((1, 0))
    a = words.slice(0, 1, 1).load(A)
    b = words.slice(1, 1, 1).load(A) if W > 1 else a
    c = words.slice(2, 1, 1).load(A) if W > 2 else a
    d = words.slice(3, 1, 1).load(A) if W > 3 else a
    if FMT[3] == X4:
        b = memory[3].index(slot).permute((1, 0)).slice(1, 1, 1).load(A).to(gl.int32)
    return scale_bytes(a, b, c, d, FMT[3])


@gluon.jit
def add_tile(total, memory, scales, x, slot, I: gl.constexpr, FMT: gl.constexpr, WARPS: gl.constexpr):
    """total [BN, BM] + tile I of a super-block times its x^T."""
    BN: gl.constexpr = total.shape[0]
    A: gl.constexpr = operand(0, WARPS)
    w = memory[0].index(slot).slice(I * FMT[0] // 16 * BN, BN, 0).load(A)
    h = w
    if FMT[1] > 0:
        h = memory[1].index(slot).slice(I * FMT[1] // 16 * BN, BN, 0).load(A)
    return mma_v2(integer_tile(w, h, scales, I, FMT), x, total)


@gluon.jit
def add_super(acc, memory, x, slot, x_slot, FMT: gl.constexpr, WARPS: gl.constexpr):
    """acc [BN, BM] + the super-block of weights in ``slot`` times the one of activations in ``x_slot``."""
    scales, least = load_scales(memory, slot, FMT, WARPS)
    total = gl.zeros_like(acc)
    for i in gl.static_range(16):
        total = add_tile(total, memory, scales, x_tile(x, x_slot, i, WARPS), slot, i, FMT, WARPS)
    return add_scaled(acc, total, memory, least, x, slot, x_slot, FMT, WARPS)


@gluon.jit
def after(slot, STAGES: gl.constexpr):
    """The buffer behind ``slot``, in a ring of STAGES."""
    return gl.where(slot == STAGES - 1, 0, slot + 1)


@gluon.jit
def _half(memory, slot, K: gl.constexpr, WARPS: gl.constexpr):
    """A row's d (0) or dmin (1), fp32 [BN, 1]."""
    half = memory[3].index(slot).permute((1, 0)).slice(K, 1, 1).load(accumulator(WARPS))
    return half.to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def add_scaled(acc, total, memory, least, x, slot, x_slot, FMT: gl.constexpr, WARPS: gl.constexpr):
    """acc + a super-block's total as its weights have it: times d, less dmin times minima times sums of x."""
    d = _half(memory, slot, 0, WARPS) * (FMT[5] / shrink(FMT))
    if has_minimum(FMT[3]):
        B: gl.constexpr = operand(1, WARPS)
        tile = minimum_tile(least, FMT, operand(0, WARPS))
        sums = x[1].index(x_slot)
        less = mma_v2(tile, sums.slice(0, 16, 1).permute((1, 0)).load(B), gl.zeros_like(acc))
        less = mma_v2(tile, sums.slice(16, 16, 1).permute((1, 0)).load(B), less)
        return acc + d * total - _half(memory, slot, 1, WARPS) * less
    else:
        return acc + d * total
