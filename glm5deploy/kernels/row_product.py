"""The product of few rows with a dense weight of a few megabytes, whose launch takes longer than its bytes.

Index keys and head weights with a weight of the model's type, a router's logits with one of fp32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, wait_for_previous
from glm5deploy.kernels.layout import require, row_tile

MOST_TOKENS = 8
"""Rows of x at most: each program reads all of them."""
ROUTER_TOKENS = 2
"""Rows of a router's product that are worth it."""
WARPS = 8


BESIDE_TOKENS = 2
"""Rows of x at most where another launch multiplies as well: more take too many registers of its four warps."""


@triton.jit
def two_columns(
    x, weight, out, i_n, tokens, outputs,
    K: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Columns i_n, int64, and i_n + 1 of a product, over all of K, so that nothing is added up between programs."""
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BR)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_k = o_k < K
    m_t = o_t < tokens
    # The last program of an odd number of columns has no second one.
    width = tl.where(i_n + 1 < outputs, K, 0)
    rows = tl.where(i_n + 1 < outputs, tokens, 0)
    EARLY: tl.constexpr = BT <= 4  # of more rows, what is loaded must be used before all of it has come
    if not EARLY:
        wait_for_previous(CHAINED)
    # Volatile loads are started in this order, before any arithmetic: the weight's, from memory, are what takes long.
    p_w = weight + i_n * K + o_k
    b_first = tl.load(p_w, mask=m_k, other=0.0, volatile=True)  # [BR, BC]
    b_second = tl.load(p_w + K, mask=o_k < width, other=0.0, volatile=True)
    if EARLY:
        wait_for_previous(CHAINED)
    p_x = x + o_t[:, None, None] * K + o_k[None, :, :]
    b_x = tl.load(p_x, mask=m_t[:, None, None] & m_k[None, :, :], other=0.0, volatile=True)  # [BT, BR, BC]
    b_x = b_x.to(tl.float32)
    b_first_out = tl.sum(tl.sum(b_x * b_first.to(tl.float32)[None, :, :], axis=1), axis=1)  # [BT]
    b_second_out = tl.sum(tl.sum(b_x * b_second.to(tl.float32)[None, :, :], axis=1), axis=1)
    p_out = out + o_t.to(tl.int64) * outputs + i_n
    tl.store(p_out, b_first_out.to(out.dtype.element_ty), mask=m_t)
    tl.store(p_out + 1, b_second_out.to(out.dtype.element_ty), mask=o_t < rows)


@triton.jit(do_not_specialize=["tokens", "outputs"])
def row_product_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    out,  # [T, N]
    tokens,
    outputs,
    K: tl.constexpr,
    BT: tl.constexpr,  # at least T
    BR: tl.constexpr,  # BR * BC are at least K
    BC: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (N / 2)."""
    i_n = tl.program_id(0).to(tl.int64) * 2
    two_columns(x, weight, out, i_n, tokens, outputs, K, BT, BR, BC, CHAINED)


def check_rows(x: torch.Tensor, weight: torch.Tensor, most: int) -> None:
    """ValueError where a launch could not multiply x [T, K] with weight [N, K], or not so many rows."""
    tokens, width = x.shape
    require(weight.shape[1] == width, f"weight must be [N, {width}]")
    require(x.is_contiguous() and weight.is_contiguous(), "both must be contiguous")
    require(weight.dtype in (x.dtype, torch.float32), f"weight must be of x's type, {x.dtype}, or fp32")
    require(tokens <= most, f"at most {most} rows, not {tokens}")


def row_product(x: torch.Tensor, weight: torch.Tensor, warps: int = WARPS) -> torch.Tensor:
    """x [T, K] times weight [N, K], both contiguous, T <= :data:`MOST_TOKENS` -> [T, N] of the weight's type.

    The weight is of x's type or fp32. Summed in fp32 and rounded once, as cuBLAS does; the order of the sum is another.
    """
    check_rows(x, weight, MOST_TOKENS)
    (tokens, width), outputs = x.shape, weight.shape[0]
    out = weight.new_empty((tokens, outputs))
    rows, columns = row_tile(width, warps)
    if tokens:
        row_product_kernel[(triton.cdiv(outputs, 2),)](
            x,
            weight,
            out,
            tokens,
            outputs,
            K=width,
            BT=triton.next_power_of_2(tokens),
            BR=rows,
            BC=columns,
            num_warps=warps,
            **chained(x.device),
        )
    return out
