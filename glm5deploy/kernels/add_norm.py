"""What is between two parts of a layer, in one launch: a part's output is added to the residual, and the sum normed.

Rounded where vLLM 0.32 and 0.33 round on CUDA without torch.compile, where `vllm.ir` hands both of its norms to vLLM's
own kernels (`_C.fused_add_rms_norm` and `_C.rms_norm`): the sum is rounded to its type, and what is normed is that
rounded sum; the mean of its squares, its root and the product with the weight are fp32, and the result is rounded once.
vLLM's Python, which runs on a CPU and under torch.compile, norms the sum before it is rounded, and rounds twice.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.chain import chained, let_next_begin, wait_for_previous
from glm5deploy.kernels.layout import require, row_tile

MOST_TOKENS = 32
"""Rows of a launch at most; more of them are worth a kernel that reads each row once."""
PARTS, WARPS = 8, 8


@triton.jit
def rounded_sum(a, b):
    """Of two halves an addition in their own type to the compiler, which rounds alike."""
    return (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)


@triton.jit
def add_norm_kernel(
    x,  # [T, N]
    residual,  # [T, N]
    weight,  # [N]
    out,  # [T, N]
    sum_out,  # [T, N]
    eps,
    N: tl.constexpr,
    PART: tl.constexpr,  # columns that a program writes
    BR: tl.constexpr,  # BR * BC are at least N
    BC: tl.constexpr,
    BN: tl.constexpr,  # at least PART
    ADD: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Grid (T, parts). A program reads its whole row for the mean of squares and writes a part of it."""
    i_row = tl.program_id(0).to(tl.int64) * N
    o_a = tl.arange(0, BR)[:, None] * BC + tl.arange(0, BC)[None, :]
    m_a = o_a < N
    o_p = tl.arange(0, BN)
    o_n = tl.program_id(1) * PART + o_p
    m_n = (o_p < PART) & (o_n < N)
    # A launch of one row takes as long as what its reads wait for. They are volatile so that all are started before
    # any arithmetic, in this order: the compiler saves registers by starting the weight's, which no cache holds, last.
    b_weight = tl.load(weight + o_n, mask=m_n, other=0.0, volatile=True)  # [BN]
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    b_all = tl.load(x + i_row + o_a, mask=m_a, other=0.0, volatile=True)  # [BR, BC]
    if ADD:
        b_all = rounded_sum(b_all, tl.load(residual + i_row + o_a, mask=m_a, other=0.0, volatile=True))
    b_own = tl.load(x + i_row + o_n, mask=m_n, other=0.0, volatile=True)  # [BN]
    if ADD:
        b_own = rounded_sum(b_own, tl.load(residual + i_row + o_n, mask=m_n, other=0.0, volatile=True))
        tl.store(sum_out + i_row + o_n, b_own, mask=m_n)
    b_wide = b_all.to(tl.float32)
    b_mean = tl.div_rn(tl.sum(tl.sum(b_wide * b_wide, axis=0), axis=0), 1.0 * N)
    b_out = b_own.to(tl.float32) * tl.rsqrt(b_mean + eps) * b_weight.to(tl.float32)
    tl.store(out + i_row + o_n, b_out.to(out.dtype.element_ty), mask=m_n)


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    parts: int = PARTS,
    warps: int = WARPS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and residual [T, N], weight [N], contiguous and of one type -> x + residual, normed, and the sum itself.

    Without a residual the sum is x. Neither input is written. ``parts`` programs of ``warps`` a row.
    """
    tokens, width = x.shape
    inputs = [x, weight] if residual is None else [x, weight, residual]
    require(weight.shape == (width,), f"weight must be [{width}]")
    require(residual is None or residual.shape == x.shape, f"residual must be [{tokens}, {width}]")
    require(all(t.is_contiguous() and t.dtype == x.dtype for t in inputs), "all must be contiguous and of one type")
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    part = triton.cdiv(width, 8 * parts) * 8
    rows, columns = row_tile(width, warps)
    if tokens:
        add_norm_kernel[(tokens, triton.cdiv(width, part))](
            x,
            x if residual is None else residual,
            weight,
            out,
            total,
            eps,
            N=width,
            PART=part,
            BR=rows,
            BC=columns,
            BN=triton.next_power_of_2(part),
            ADD=residual is not None,
            num_warps=warps,
            **chained(x.device),
        )
    return out, total


def add_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in torch."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total
