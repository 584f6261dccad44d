"""Brings rows of the latent cache to shared memory: the copying warps of `sparse_mla_hopper.py`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from glm5deploy.kernels.chain import wait_for_previous


@gluon.jit
def copy_rows(rows, source, tiles, ropes, full, empty):
    """Start copying 64 rows after 64 rows; a copy's arrival counts towards `full`. Absent rows (-1) become zeros."""
    p_slot, end, steps = source
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_k = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    o_d = gl.arange(0, 512, gl.SliceLayout(0, COPY))[None, :]
    o_r = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    b_slot = gl.load(p_slot + o_k, mask=o_k < end, other=-1)
    for i in range(steps):
        m_row = (b_slot >= 0)[:, None]
        p_row = rows + gl.where(b_slot >= 0, b_slot, 0).to(gl.int64)[:, None] * 576
        o_next = (i + 1) * 64 + o_k
        b_slot = gl.load(p_slot + o_next, mask=o_next < end, other=-1)
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        async_copy.async_load(tiles.index(i & 1), p_row + o_d, m_row)
        async_copy.async_load(ropes.index(i & 1), p_row + 512 + o_r, m_row)
        async_copy.mbarrier_arrive(full.index(i & 1), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def unpack(b_byte, b_scale):
    """e4m3 bytes (uint8) times a bf16 scale, which comes multiplied by 2^120: see `fp8.e4m3_to_bf16`."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, a, b, zero;
        mov.b32 zero, 0x80008000;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 a, low, 4;
        shr.u32 b, high, 4;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        lop3.b32 a, low, 0x80008000, a, 0xEA;
        lop3.b32 b, high, 0x80008000, b, 0xEA;
        fma.rn.bf16x2 $0, a, $3, zero;
        fma.rn.bf16x2 $1, b, $4, zero;
        }
        """,
        "=r,=r,r,r,r",
        [b_byte, b_scale],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def load_piece(p_row, m_row, I_C: gl.constexpr, COPY: gl.constexpr):
    """Bytes 128 * I_C to 128 * I_C + 127 of packed rows, [64, 128], and their scale, [64]."""
    o_d = I_C * 128 + gl.arange(0, 128, gl.SliceLayout(0, COPY))
    b_byte = gl.load(p_row[:, None] + o_d[None, :], mask=m_row[:, None], other=0)
    p_scale = (p_row + (512 + 4 * I_C)).to(gl.pointer_type(gl.float32), bitcast=True)
    return b_byte, gl.load(p_scale, mask=m_row, other=0.0)


@gluon.jit
def store_piece(tile, b_byte, b_scale, I_C: gl.constexpr):
    b_byte, b_scale = gl.broadcast(b_byte, (b_scale * 1.329227995784916e36).to(gl.bfloat16)[:, None])
    tile.slice(I_C * 128, 128, 1).store(unpack(b_byte, b_scale).to(tile.dtype))


@gluon.jit
def unpack_rows(rows, source, tiles, ropes, full, empty):
    """As `copy_rows`, but packed rows, through registers and with their scale.

    Scales are below 2^8 and such as bf16 holds, as our writer's are; the product is rounded to bf16.
    """
    p_slot, end, steps = source
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_k = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    o_r = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    b_slot = gl.load(p_slot + o_k, mask=o_k < end, other=-1)
    for i in range(steps):
        m_row = b_slot >= 0
        p_row = rows + gl.where(m_row, b_slot, 0).to(gl.int64) * 656
        b_byte0, b_scale0 = load_piece(p_row, m_row, 0, COPY)
        b_byte1, b_scale1 = load_piece(p_row, m_row, 1, COPY)
        p_rope = (p_row + 528).to(gl.pointer_type(gl.bfloat16), bitcast=True)[:, None]
        b_rope = gl.load(p_rope + o_r, mask=m_row[:, None], other=0.0)
        o_next = (i + 1) * 64 + o_k
        b_slot = gl.load(p_slot + o_next, mask=o_next < end, other=-1)
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        tile, rope = tiles.index(i & 1), ropes.index(i & 1)
        b_byte2, b_scale2 = load_piece(p_row, m_row, 2, COPY)
        store_piece(tile, b_byte0, b_scale0, 0)
        b_byte3, b_scale3 = load_piece(p_row, m_row, 3, COPY)
        store_piece(tile, b_byte1, b_scale1, 1)
        store_piece(tile, b_byte2, b_scale2, 2)
        store_piece(tile, b_byte3, b_scale3, 3)
        rope.store(b_rope.to(rope.dtype))
        fence_async_shared()
        mbarrier.arrive(full.index(i & 1), count=1)


@gluon.jit
def bring(rows, source, shared, KV_FP8: gl.constexpr, CHAINED: gl.constexpr):
    wait_for_previous(CHAINED)
    tiles, ropes, full, empty = shared
    if KV_FP8:
        unpack_rows(rows, source, tiles, ropes, full, empty)
    else:
        copy_rows(rows, source, tiles, ropes, full, empty)
