"""Request-local positions to physical cache rows."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.layout import require

BESIDE_COLUMNS = 2048
"""K at most where another launch looks them up as well: more take too many registers of its four warps."""


class Lookup(NamedTuple):
    """The arguments of :func:`slots_from_positions`, for a launch that does the same beside its own work."""

    positions: torch.Tensor
    request_of_token: torch.Tensor
    block_table: torch.Tensor
    block_size: int
    slots: torch.Tensor
    counts: torch.Tensor
    rows_per_block: int

    @property
    def padded_columns(self) -> int:
        """K as a kernel is compiled for it."""
        return triton.next_power_of_2(self.positions.shape[1])


@triton.jit
def look_up(
    i_t, positions, request_of_token, block_table, slots, counts, columns, rows_per_block, table_width,
    stride_positions, stride_table, stride_slots, BLOCK: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One token's positions, int64 i_t; the arguments are those of ``slots_kernel``."""
    o_k = tl.arange(0, BK)
    m_k = o_k < columns
    i_r = tl.load(request_of_token + i_t).to(tl.int64)
    b_position = tl.load(positions + i_t * stride_positions + o_k, mask=m_k, other=-1)
    b_logical = b_position // BLOCK
    m_valid = (b_position >= 0) & (b_logical < table_width)
    b_block = tl.load(block_table + i_r * stride_table + b_logical, mask=m_valid, other=0)
    b_slot = tl.where(m_valid, b_block * rows_per_block + b_position % BLOCK, -1)
    tl.store(slots + i_t * stride_slots + o_k, b_slot, mask=m_k)
    tl.store(counts + i_t, tl.sum(m_valid.to(tl.int32), axis=0))


@triton.jit(
    do_not_specialize=["columns", "rows_per_block", "table_width", "stride_positions", "stride_table", "stride_slots"],
    do_not_specialize_on_alignment=["positions", "request_of_token", "block_table", "slots", "counts"],
)
def slots_kernel(
    positions,  # int32 [T, K], -1 padded
    request_of_token,  # int [T]
    block_table,  # int32 [R, table_width]
    slots,  # int32 [T, K]
    counts,  # int32 [T]
    columns,  # K
    rows_per_block,
    table_width,
    stride_positions,
    stride_table,
    stride_slots,
    BLOCK: tl.constexpr,  # tokens of a cache block
    BK: tl.constexpr,  # at least K
):
    i_t = tl.program_id(0).to(tl.int64)
    strides = stride_positions, stride_table, stride_slots
    sizes = columns, rows_per_block, table_width
    look_up(i_t, positions, request_of_token, block_table, slots, counts, *sizes, *strides, BLOCK, BK)


def look_up_arguments(lookup: Lookup) -> tuple[torch.Tensor | int, ...]:
    """What a kernel passes on to ``look_up``, in order; ValueError where it could not read or write them."""
    positions, requests, table, _, out, counts, rows_per_block = lookup
    require(positions.dtype == table.dtype == out.dtype == torch.int32, "positions, table and out must be int32")
    require(positions.stride(1) == table.stride(1) == out.stride(1) == 1, "rows must have unit column stride")
    sizes = positions.shape[1], rows_per_block, table.shape[1]
    return positions, requests, table, out, counts, *sizes, positions.stride(0), table.stride(0), out.stride(0)


def slots_from_positions(
    positions: torch.Tensor,
    request_of_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    out: torch.Tensor,
    counts: torch.Tensor,
    rows_per_block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.slots_from_positions` on the GPU, for any K.

    positions int32 [T, K], request_of_token int [T], block_table int32 [R, B] -> out int32 [T, K], counts int32 [T].
    A row index must fit int32: rows_per_block * blocks < 2^31 (bytes are addressed in 64 bits by the readers).
    """
    rows = block_size if rows_per_block is None else rows_per_block
    lookup = Lookup(positions, request_of_token, block_table, block_size, out, counts, rows)
    arguments, columns = look_up_arguments(lookup), lookup.padded_columns
    if positions.shape[0]:
        slots_kernel[(positions.shape[0],)](
            *arguments, BLOCK=block_size, BK=columns, num_warps=4 if columns <= BESIDE_COLUMNS else 8
        )
    return out, counts
