"""The query as attention over latents takes it: its first part times W_UK, its RoPE part rotated, in one launch.

Rounded where vLLM 0.32 and 0.33 round on CUDA: the product once, from fp32, and RoPE once, computed in fp32 with
cosines and sines in the model's type. What the query is going to attend to may be looked up in the same launch.
"""

# Triton reads these functions: tuples grow by addition.
# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, let_next_begin, wait_for_previous
from glm5deploy.kernels.latent_cache import token_stride
from glm5deploy.kernels.layout import LATENT_DIM, ROPE_DIM, require
from glm5deploy.kernels.reference import rope_interleaved
from glm5deploy.kernels.rope import rotate_pairs
from glm5deploy.kernels.slots import BESIDE_COLUMNS, Lookup, look_up, look_up_arguments, slots_from_positions

_TILE_TOKENS = 16
MOST_TOKENS = _TILE_TOKENS
"""More of them are worth cuBLAS, which the same launch then leaves the product to."""
_COLUMNS = 32  # of a tile of the product; 8 heads are 128 programs then, one for nearly every multiprocessor
_ROPE_TOKENS = 8
REGISTERS = 64
"""Of a thread. Without a limit the compiler aims at 40 and has a product's loads wait for each other."""


@triton.jit
def absorb_tile(
    q, weight, latent_out, tokens, stride_q, stride_weight_h, i_h, i_n,
    H: tl.constexpr, NOPE: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Columns i_n * BN and on of one head's product, for all tokens."""
    o_t = tl.arange(0, BT).to(tl.int64)
    o_k = tl.arange(0, BK)
    o_n = i_n * BN + tl.arange(0, BN)
    m_t = (o_t < tokens)[:, None]
    p_q = q + o_t[:, None] * stride_q + i_h * (NOPE + 64) + o_k[None, :]
    p_w = weight + i_h.to(tl.int64) * stride_weight_h + o_k[:, None] * 512 + o_n[None, :]
    # All loads before the first product, which has a barrier that none is started across: tiles of the weight would be
    # waited for one after the other.
    weights = ()
    queries = ()
    for k in tl.static_range(0, NOPE, BK):
        weights = weights + (tl.load(p_w + k * 512),)
    wait_for_previous(CHAINED)
    for k in tl.static_range(0, NOPE, BK):
        queries = queries + (tl.load(p_q + k, mask=m_t, other=0.0),)
    let_next_begin(CHAINED)
    b_out = tl.zeros([BT, BN], tl.float32)
    for k in tl.static_range(0, NOPE // BK):
        b_out = tl.dot(queries[k], weights[k], b_out, input_precision="ieee")
    p_out = latent_out + (o_t[:, None] * H + i_h) * 512 + o_n[None, :]
    tl.store(p_out, b_out.to(latent_out.dtype.element_ty), mask=m_t)


@triton.jit
def rotate(
    q, positions, cos_sin, rope_out, tokens, stride_q, i_h, i_t,
    H: tl.constexpr, NOPE: tl.constexpr, BR: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One head's RoPE values of BR tokens from i_t * BR on."""
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    o_t = i_t.to(tl.int64) * BR + tl.arange(0, BR)
    m_t = (o_t < tokens)[:, None]
    o_p = tl.arange(0, 32)
    p_q = q + o_t[:, None] * stride_q + i_h * (NOPE + 64) + NOPE + 2 * o_p[None, :]
    b_even = tl.load(p_q, mask=m_t, other=0.0).to(tl.float32)
    b_odd = tl.load(p_q + 1, mask=m_t, other=0.0).to(tl.float32)
    i_position = tl.load(positions + o_t, mask=o_t < tokens, other=0).to(tl.int64)
    p_angle = cos_sin + i_position[:, None] * 64 + o_p[None, :]
    b_cos = tl.load(p_angle).to(tl.float32)
    b_sin = tl.load(p_angle + 32).to(tl.float32)
    p_out = rope_out + (o_t[:, None] * H + i_h) * 64 + 2 * o_p[None, :]
    b_first, b_second = rotate_pairs(b_even, b_odd, b_cos, b_sin)
    tl.store(p_out, b_first.to(rope_out.dtype.element_ty), mask=m_t)
    tl.store(p_out + 1, b_second.to(rope_out.dtype.element_ty), mask=m_t)


_TABLES = ("selected", "request_of_token", "block_table", "slots", "counts")
_SIZES = ("columns", "rows_per_block", "table_width", "stride_selected", "stride_table", "stride_slots")


@triton.jit(
    do_not_specialize=["tokens", *_SIZES],
    do_not_specialize_on_alignment=["positions", *_TABLES],
)
def query_input_kernel(
    q,  # [T, H, NOPE + 64]
    weight,  # [H, NOPE, 512]
    positions,  # int [T]
    cos_sin,  # [P, 64]: 32 cosines, then 32 sines
    latent_out,  # [T, H, 512]
    rope_out,  # [T, H, 64]
    selected,  # int32 [T, columns]; it and what follows are the arguments of `look_up`, not read without COLUMNS
    request_of_token,
    block_table,
    slots,
    counts,
    columns,
    rows_per_block,
    table_width,
    stride_selected,
    stride_table,
    stride_slots,
    tokens,
    stride_q,
    stride_weight_h,
    H: tl.constexpr,
    NOPE: tl.constexpr,
    BK: tl.constexpr,  # divides NOPE
    BN: tl.constexpr,  # columns of a program's tile
    BT: tl.constexpr,  # tokens of it, all there are
    BR: tl.constexpr,  # tokens a program rotates
    PRODUCT: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two, at least `columns`; or 0
    BLOCK: tl.constexpr,  # tokens of a cache block
    CHAINED: tl.constexpr,
):
    """Grid (H, 512 / BN tiles with PRODUCT, then T / BR rotations, then with COLUMNS T / H tokens' look-ups)."""
    i_h = tl.program_id(0)
    TILES: tl.constexpr = 512 // BN if PRODUCT else 0
    i_n = tl.program_id(1) - TILES
    if i_n < 0:
        if PRODUCT:
            strides = stride_q, stride_weight_h
            absorb_tile(q, weight, latent_out, tokens, *strides, i_h, i_n + TILES, H, NOPE, BK, BN, BT, CHAINED)
    elif i_n < tl.cdiv(tokens, BR):
        rotate(q, positions, cos_sin, rope_out, tokens, stride_q, i_h, i_n, H, NOPE, BR, CHAINED)
    elif COLUMNS > 0:
        wait_for_previous(CHAINED)
        let_next_begin(CHAINED)
        i_t = (i_n - tl.cdiv(tokens, BR)).to(tl.int64) * H + i_h
        if i_t < tokens:
            sizes = columns, rows_per_block, table_width, stride_selected, stride_table, stride_slots
            look_up(i_t, selected, request_of_token, block_table, slots, counts, *sizes, BLOCK, COLUMNS)


def query_input(
    q: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    lookup: Lookup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, H, N + 64], weight [H, N, 512], positions int [T], cos_sin [P, 64] -> [T, H, 512] and [T, H, 64].

    All of one type. Beyond :data:`MOST_TOKENS` the product is cuBLAS's, a launch of its own. ``lookup``, of the same T
    tokens, is done as well: by the same launch up to `slots.BESIDE_COLUMNS` positions a token, else by its own.
    """
    tokens, heads, width = q.shape
    nope = width - ROPE_DIM
    block = next((b for b in (64, 32, 16) if nope > 0 and nope % b == 0), 0)
    require(block > 0 and q.stride()[1:] == (width, 1), f"q must be [T, H, N + {ROPE_DIM}], N a multiple of 16")
    require(weight.shape == (heads, nope, LATENT_DIM), f"weight must be [{heads}, {nope}, {LATENT_DIM}]")
    require(weight.stride()[1:] == (LATENT_DIM, 1), "a head's weight must be contiguous")
    require(cos_sin.shape[1] == ROPE_DIM and cos_sin.is_contiguous(), f"cos_sin must be [P, {ROPE_DIM}]")
    require(lookup is None or lookup.positions.shape[0] == tokens, "what is looked up must be of the same tokens")
    latent, rope = q.new_empty((tokens, heads, LATENT_DIM)), q.new_empty((tokens, heads, ROPE_DIM))
    if tokens == 0:
        return latent, rope
    if lookup is not None and lookup.padded_columns > BESIDE_COLUMNS:
        slots_from_positions(*lookup)
        lookup = None
    looked_up = (*[positions] * len(_TABLES), *[0] * len(_SIZES)) if lookup is None else look_up_arguments(lookup)
    few = tokens <= MOST_TOKENS
    if not few:
        torch.bmm(q[..., :nope].transpose(0, 1), weight, out=latent.transpose(0, 1))
    tiles = LATENT_DIM // _COLUMNS if few else 0
    lookups = 0 if lookup is None else triton.cdiv(tokens, heads)
    query_input_kernel[(heads, tiles + triton.cdiv(tokens, _ROPE_TOKENS) + lookups)](
        q,
        weight,
        positions,
        cos_sin,
        latent,
        rope,
        *looked_up,
        tokens,
        token_stride(q),
        weight.stride(0),
        H=heads,
        NOPE=nope,
        BK=block,
        BN=_COLUMNS,
        BT=_TILE_TOKENS,
        BR=_ROPE_TOKENS,
        PRODUCT=few,
        COLUMNS=0 if lookup is None else lookup.padded_columns,
        BLOCK=1 if lookup is None else lookup.block_size,
        num_warps=4,
        maxnreg=REGISTERS,
        **chained(q.device),
    )
    return latent, rope


def query_input_reference(
    q: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch, the product summed in fp32."""
    nope = weight.shape[1]
    latent = torch.einsum("thp,hpl->thl", q[..., :nope].float(), weight.float()).to(q.dtype)
    return latent, rope_interleaved(q[..., nope:], positions, cos_sin).to(q.dtype)
