"""Sparse MLA forward on Hopper's matrix unit, in Gluon: one program per (token, block of heads, split of positions).

What the portable kernel (`sparse_mla.py`) leaves to the compiler is laid out by hand here. Some warps only bring rows,
64 at a time, into two tiles of shared memory; for every 32 heads a warpgroup only computes. `full[b]` says that tile b
is there, `empty[b]` that every warpgroup is done with it. Scores and output are computed transposed, [rows, heads] and
[dimensions, heads], because the matrix instruction has 64 rows and few heads would leave most of them idle. Tile
arithmetic: README.md.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from glm5deploy.kernels.chain import wait_for_previous
from glm5deploy.kernels.sparse_mla_hopper_rows import bring


@gluon.jit
def score(shared, query, query_rope, i, ACC: gl.constexpr):
    """Start the product of the i-th tile with the queries, [64, heads], once the tile is there."""
    tiles, ropes, full, _ = shared
    mbarrier.wait(full.index(i & 1), (i >> 1) & 1)
    fence_async_shared()
    b_s = gl.zeros([64, query.shape[0]], gl.float32, ACC)
    b_s = warpgroup_mma(tiles.index(i & 1), query.permute((1, 0)), b_s, use_acc=False, is_async=True)
    return warpgroup_mma(ropes.index(i & 1), query_rope.permute((1, 0)), b_s, is_async=True)


@gluon.jit
def weigh(b_s, source, i, b_m, b_l, b_o, weights, scale_log2):
    """A step of the streaming softmax: weights to shared memory; maximum, sums and output so far to the new scale."""
    p_slot, end, _ = source
    o_k = i * 64 + gl.arange(0, 64, gl.SliceLayout(1, b_s.type.layout))
    m_slot = gl.load(p_slot + o_k, mask=o_k < end, other=-1) >= 0
    b_s = gl.where(m_slot[:, None], b_s * scale_log2, -2.0e30)
    b_m_new = gl.maximum(b_m, gl.max(b_s, axis=0))
    b_shrink = gl.exp2(b_m - b_m_new)
    b_p = gl.exp2(b_s - b_m_new[None, :])
    weights.permute((1, 0)).store(b_p.to(weights.dtype))
    # Summed over the rows at the end: a sum in each step would be another exchange between the warps.
    b_l = b_l * b_shrink[None, :] + b_p
    b_o = b_o * b_shrink[None, :]
    fence_async_shared()
    gl.barrier()
    return b_m_new, b_l, b_o


@gluon.jit
def attend(
    queries, strides, source, shared, own, results, scale_log2, SPLIT: gl.constexpr, GROUP: gl.constexpr,
    CHAINED: gl.constexpr,
):  # fmt: skip
    """A warpgroup's N heads over all tiles."""
    if GROUP > 0:  # the first one's warps have waited
        wait_for_previous(CHAINED)
    p_nope, p_rope, heads = queries
    stride_nope_h, stride_rope_h, splits = strides
    tiles, _, _, empty = shared
    steps = source[2]
    query, query_rope, weights = own[0].index(GROUP), own[1].index(GROUP), own[2].index(GROUP)
    N: gl.constexpr = query.shape[0]
    heads -= GROUP * N
    p_nope += GROUP * N * stride_nope_h
    p_rope += GROUP * N * stride_rope_h
    p_out = results[0] + GROUP * N * splits * 512
    p_lse = results[1] + GROUP * N * splits
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_h = gl.arange(0, N, gl.SliceLayout(1, WIDE))[:, None]
    o_d = gl.arange(0, 512, gl.SliceLayout(0, WIDE))[None, :]
    query.store(gl.load(p_nope + o_h * stride_nope_h + o_d, mask=o_h < heads, other=0.0))
    o_hr = gl.arange(0, N, gl.SliceLayout(1, NARROW))[:, None]
    o_r = gl.arange(0, 64, gl.SliceLayout(0, NARROW))[None, :]
    query_rope.store(gl.load(p_rope + o_hr * stride_rope_h + o_r, mask=o_hr < heads, other=0.0))
    fence_async_shared()
    gl.barrier()

    # Finite stand-ins for -inf, as in the portable kernel.
    b_m = gl.full([N], -1.0e30, gl.float32, gl.SliceLayout(0, ACC))
    b_l = gl.zeros([64, N], gl.float32, ACC)
    b_o = gl.zeros([512, N], gl.float32, ACC)
    for i in range(steps):
        b_s = warpgroup_mma_wait(0, deps=[score(shared, query, query_rope, i, ACC)])
        b_m, b_l, b_o = weigh(b_s, source, i, b_m, b_l, b_o, weights, scale_log2)
        b_o = warpgroup_mma(tiles.index(i & 1).permute((1, 0)), weights.permute((1, 0)), b_o, is_async=True)
        b_o = warpgroup_mma_wait(0, deps=[b_o])
        mbarrier.arrive(empty.index(i & 1), count=1)

    b_sum = gl.sum(b_l, axis=0)
    m_some = b_sum > 0
    b_o = b_o * (1.0 / gl.where(m_some, b_sum, 1.0))[None, :]
    b_lse = gl.where(m_some, (b_m + gl.log2(b_sum)) * 0.6931471805599453, float("-inf"))
    o_n = gl.arange(0, N, gl.SliceLayout(0, ACC))
    gl.store(p_lse + o_n * splits, b_lse, mask=o_n < heads)
    if SPLIT:
        p_out += (o_n * splits * 512)[None, :] + gl.arange(0, 512, gl.SliceLayout(1, ACC))[:, None]
        gl.store(p_out, b_o, mask=(o_n < heads)[None, :])
    else:
        # Through the queries' memory, so that whole lines are written.
        query.permute((1, 0)).store(b_o.to(query.dtype))
        gl.store(p_out + o_h * 512 + o_d, query.load(WIDE), mask=o_h < heads)


@gluon.jit(
    do_not_specialize=["keys", "keys_per_split", "stride_slots"], do_not_specialize_on_alignment=["slots", "counts"]
)
def sparse_mla_hopper_kernel(
    q_nope,  # [T, H, 512]
    q_rope,  # [T, H, 64]
    rows,  # [N, 576], or packed uint8 [N, 656]
    slots,  # int32 [T, K], -1 for none
    counts,  # int32 [T]: only the first counts[t] entries of slots[t] are looked at
    out,  # [T, H, 512], or fp32 [T, H, splits, 512] when SPLIT
    lse,  # fp32 [T, H], or [T, H, splits] when SPLIT
    scale_log2,  # softmax scale * log2(e)
    keys,  # K
    keys_per_split,  # a multiple of 64
    stride_nope_t,
    stride_nope_h,
    stride_rope_t,
    stride_rope_h,
    stride_slots,
    H: gl.constexpr,
    BH: gl.constexpr,  # 8, 16, 32 or 64
    SPLIT: gl.constexpr,
    KV_FP8: gl.constexpr,
    HAS_COUNTS: gl.constexpr,
    CHAINED: gl.constexpr,
):
    N: gl.constexpr = BH if BH <= 32 else BH // 2
    GROUPS: gl.constexpr = BH // N
    BRING_WARPS: gl.constexpr = 8 if KV_FP8 else 4
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DTYPE: gl.constexpr = q_nope.dtype.element_ty
    tiles = gl.allocate_shared_memory(DTYPE, [2, 64, 512], TILE)
    ropes = gl.allocate_shared_memory(DTYPE, [2, 64, 64], TILE)
    query = gl.allocate_shared_memory(DTYPE, [GROUPS, N, 512], TILE)
    query_rope = gl.allocate_shared_memory(DTYPE, [GROUPS, N, 64], TILE)
    weights = gl.allocate_shared_memory(DTYPE, [GROUPS, N, 64], TILE)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        # A copy arrives once for each thread that started some of it, everything else once for all.
        mbarrier.init(full.index(i), count=1 if KV_FP8 else 32 * BRING_WARPS)
        mbarrier.init(empty.index(i), count=GROUPS)

    i_h = gl.program_id(0) * BH
    i_t = gl.program_id(1).to(gl.int64)
    i_s = gl.program_id(2)
    splits = gl.num_programs(2)
    begin = i_s * keys_per_split
    end = gl.minimum(keys, begin + keys_per_split)
    wait_for_previous(CHAINED)
    if HAS_COUNTS:
        end = gl.minimum(end, gl.load(counts + i_t))
    end = gl.maximum(end - begin, 0)
    o_out = (i_t * H + i_h) * splits + i_s
    p_nope = q_nope + i_t * stride_nope_t + i_h * stride_nope_h
    p_rope = q_rope + i_t * stride_rope_t + i_h * stride_rope_h
    queries, strides = (p_nope, p_rope, H - i_h), (stride_nope_h, stride_rope_h, splits)
    source = (slots + i_t * stride_slots + begin, end, gl.cdiv(end, 64))
    shared, own, results = (tiles, ropes, full, empty), (query, query_rope, weights), (out + o_out * 512, lse + o_out)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (attend, (queries, strides, source, shared, own, results, scale_log2, SPLIT, 0, CHAINED)),
                (bring, (rows, source, shared, KV_FP8, CHAINED)),
            ],
            [BRING_WARPS],
            [80],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (queries, strides, source, shared, own, results, scale_log2, SPLIT, 0, CHAINED)),
                (attend, (queries, strides, source, shared, own, results, scale_log2, SPLIT, 1, CHAINED)),
                (bring, (rows, source, shared, KV_FP8, CHAINED)),
            ],
            [4, BRING_WARPS],
            [192, 64] if KV_FP8 else [224, 56],
        )
