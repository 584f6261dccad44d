"""What follows attention over latents for few tokens, in one launch: the splits' outputs combined and times W_UV.

The combined latent is rounded once, as the combining launch rounds it; the product is summed in fp32 and rounded once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, wait_for_previous
from glm5deploy.kernels.layout import LATENT_DIM, require

MOST_ROWS = 16
"""Tokens times heads; more of them are worth two launches, as each program reads its row's parts again."""


@triton.jit(do_not_specialize=["splits"])
def value_output_kernel(
    partial,  # fp32 [T, H, splits, 512]
    partial_lse,  # fp32 [T, H, splits]
    weight,  # [H, VALUES, 512]
    out,  # [T, H, VALUES]
    splits,
    stride_weight_h,
    VALUES: tl.constexpr,
    BS: tl.constexpr,  # at least splits
    BV: tl.constexpr,  # values of a program, divides VALUES
    CHAINED: tl.constexpr,
):
    """Grid (VALUES / BV, H, T). Four warps have 512 latents side by side, so a thread adds all splits of its own."""
    i_h = tl.program_id(1)
    i_row = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + i_h
    o_s = tl.arange(0, BS)
    o_d = tl.arange(0, 512)
    o_v = tl.program_id(0) * BV + tl.arange(0, BV)
    p_part = partial + (i_row * splits + o_s[:, None]) * 512 + o_d[None, :]
    b_w = tl.load(weight + i_h.to(tl.int64) * stride_weight_h + o_v[:, None] * 512 + o_d[None, :])  # [BV, 512]
    wait_for_previous(CHAINED)
    b_part = tl.load(p_part, mask=(o_s < splits)[:, None], other=0.0)  # [BS, 512]
    # No load is moved over a barrier: half of those above would otherwise be started when the lse is there.
    tl.debug_barrier()
    b_lse = tl.load(partial_lse + i_row * splits + o_s, mask=o_s < splits, other=float("-inf"))  # [BS]
    b_finite = tl.maximum(b_lse, -1.0e30)
    b_share = tl.where(b_lse > -1.0e30, tl.exp(b_finite - tl.max(b_finite, axis=0)), 0.0)
    b_sum = tl.sum(b_share, axis=0)
    b_latent = tl.sum(b_part * b_share[:, None], axis=0) / tl.where(b_sum > 0, b_sum, 1.0)
    DTYPE: tl.constexpr = out.dtype.element_ty
    b_out = b_w.to(tl.float32) * b_latent.to(DTYPE).to(tl.float32)[None, :]
    tl.store(out + i_row * VALUES + o_v, tl.sum(b_out, axis=1).to(DTYPE))


def values_fuse(rows: int, splits: int, weight: torch.Tensor) -> bool:
    """Whether :func:`value_output` takes ``rows`` tokens times heads of ``splits`` parts for this W_UV [H, 512, V]."""
    return splits > 1 and rows <= MOST_ROWS and weight.shape[2] % 16 == 0 and weight.stride()[1:] == (1, LATENT_DIM)


def value_variant(rows: int, splits: int, values: int) -> tuple[int, int, int]:
    """What a launch is compiled for: splits, values of a program and warps."""
    columns = value_columns(rows, values)
    return value_splits(splits), columns, value_warps(splits, columns)


def value_columns(rows: int, values: int) -> int:
    """Values of a program: each reads all parts of its row, so rows are dealt out to as few as fill a GPU."""
    most = 16 if rows <= 8 else 32
    return next(width for width in (32, 16) if width <= most and values % width == 0)


def value_warps(splits: int, columns: int) -> int:
    """Warps that hold a program's parts and weights in registers, all loaded at once."""
    return 16 if splits > 32 else 4


def value_output(
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    splits: int,
    weight: torch.Tensor,
    out: torch.Tensor,
    columns: int | None = None,
    warps: int | None = None,
) -> torch.Tensor:
    """Attention's values out [T, H, V] from the parts that `attention.attend_parts` left.

    partial fp32 [T * H * splits * 512] and partial_lse fp32 [T * H * splits]; a part without a valid slot is zeros and
    -inf, and a row that has no other gives zeros. weight [H, 512, V], in memory [H, V, 512] with V a multiple of 16, of
    out's type. ``columns``, a divisor of V, and ``warps`` in place of :func:`value_columns` and :func:`value_warps`.
    """
    tokens, heads, values = out.shape
    require(weight.shape == (heads, LATENT_DIM, values), f"weight must be [{heads}, {LATENT_DIM}, {values}]")
    require(weight.stride()[1:] == (1, LATENT_DIM), "a head's weight must lie in memory as [V, 512]")
    require(values % 16 == 0 and out.is_contiguous(), "out must be contiguous, and V a multiple of 16")
    require(partial.numel() == tokens * heads * splits * LATENT_DIM, "parts do not fit out's rows")
    if tokens == 0:
        return out
    columns = value_columns(tokens * heads, values) if columns is None else columns
    value_output_kernel[(values // columns, heads, tokens)](
        partial,
        partial_lse,
        weight,
        out,
        splits,
        weight.stride(0),
        VALUES=values,
        BS=value_splits(splits),
        BV=columns,
        num_warps=value_warps(splits, columns) if warps is None else warps,
        **chained(out.device),
    )
    return out


def value_splits(splits: int) -> int:
    """Splits the kernel is compiled for: 16, 32 or 64."""
    return 16 if splits <= 16 else 32 if splits <= 32 else 64


def value_output_reference(
    partial: torch.Tensor, partial_lse: torch.Tensor, splits: int, weight: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same in torch, [T, H, V] of ``dtype``; arguments as above."""
    heads = weight.shape[0]
    lse = partial_lse.view(-1, heads, splits)
    parts = torch.where(lse.isneginf()[..., None], 0, partial.view(-1, heads, splits, LATENT_DIM))
    shares = torch.softmax(lse, dim=-1).nan_to_num(0)
    latent = torch.einsum("ths,thsl->thl", shares, parts).to(dtype)
    return torch.einsum("thl,hlv->thv", latent.float(), weight.float()).to(dtype)
