"""The router of routed experts in one launch: fp32 product, sigmoid, the best experts by score and bias, their weights.

Every program multiplies a few experts' weights with a part of the tokens' inputs; the last one to arrive adds the parts
in order, so the result does not depend on timing, and selects. It is for few tokens: one program selects for all.

Rounded as vLLM 0.32 and 0.33 do it: product, scores and weights in fp32, weights divided by their sum and 1e-20, so
that scores which are all zero give zeros. Of equal scores the first experts are taken.
"""

# Triton reads these functions: branches on constants keep their plain form, tuples grow by addition.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from glm5deploy.quants.arguments import row_stride
from glm5deploy.quants.counters import prepare, stream_tickets
from glm5deploy.quants.linear_kernel import add_parts, arrive

MOST_TOKENS = 8
_LEAST = tl.constexpr(-(2**31))  # below every score


@dataclass(frozen=True, slots=True)
class RouterLaunch:
    """Tokens and experts of a program, parts of K, and warps, each of which reads 128 of K at a time."""

    tokens: int
    experts: int
    parts: int
    warps: int


# By the most tokens, each a variant. Programs of a single warp have all their reads under way at once and select
# without a barrier, but for one token after the other.
LAUNCHES = (RouterLaunch(1, 1, 2, 1), RouterLaunch(2, 1, 2, 1), RouterLaunch(4, 2, 2, 4), RouterLaunch(8, 2, 2, 4))


@triton.jit
def ordered(score):
    """Numbers int32 in the order of scores fp32, and above :data:`_LEAST`; NaN is above or below all."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _LEAST + 1)


@triton.jit
def select(
    logits, b_bias, ids, weights, T, scale,
    E: tl.constexpr, TOPK: tl.constexpr, PARTS: tl.constexpr, BT: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """ids and weights [T, TOPK] from logits [PARTS, T, E] and biases [BX]."""
    o_t = tl.arange(0, BT)[:, None]
    o_e = tl.arange(0, BX)[None, :]
    m_e = o_e < E
    b_score = tl.sigmoid(add_parts(logits + o_t * E + o_e, T * E, (o_t < T) & m_e, PARTS))
    b_key = tl.where(m_e, ordered(b_score + b_bias[None, :]), _LEAST)
    b_rank = tl.full([BT, BX], TOPK, tl.int32)
    for s in tl.static_range(TOPK):
        b_best = tl.max(b_key, axis=1)[:, None]
        b_first = tl.min(tl.where(b_key == b_best, o_e, BX), axis=1)[:, None]
        b_rank = tl.where(o_e == b_first, s, b_rank)
        b_key = tl.where(o_e == b_first, _LEAST, b_key)
    m_chosen = b_rank < TOPK
    b_sum = tl.sum(tl.where(m_chosen, b_score, 0.0), axis=1)[:, None]
    o_out = o_t * TOPK + b_rank
    m_out = m_chosen & (o_t < T)
    tl.store(ids + o_out, o_e + tl.zeros([BT, BX], tl.int32), mask=m_out)
    tl.store(weights + o_out, b_score * (scale / (b_sum + 1e-20)), mask=m_out)


@triton.jit(do_not_specialize=["T"])
def router_kernel(
    x, weight, bias, ids, weights, logits, ticket, T, x_stride, scale,
    E: tl.constexpr, K: tl.constexpr, TOPK: tl.constexpr, PARTS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """x [T, K], weight fp32 [E, K], bias fp32 [E] -> ids int32 and weights fp32 [T, TOPK]; logits fp32 [PARTS, T, E].

    Grid (E / BE, PARTS); BT >= T and BX >= E are powers of two; ticket int32, zero between launches.
    """
    part = tl.program_id(1)
    o_e = tl.program_id(0) * BE + tl.arange(0, BE)
    # Read by all, long before the one that selects needs it.
    o_x = tl.arange(0, BX)
    b_bias = tl.load(bias + o_x, mask=o_x < E, other=0.0)
    p_w = weight + tl.minimum(o_e, E - 1)[:, None] * K
    CHUNKS: tl.constexpr = (K + PARTS * BK - 1) // (PARTS * BK)
    EVEN: tl.constexpr = K % (PARTS * BK) == 0
    # All reads of weights are under way before anything is multiplied.
    rows = ()
    for c in tl.static_range(CHUNKS):
        o_k = (part * CHUNKS + c) * BK + tl.arange(0, BK)
        if EVEN:
            b_w = tl.load(p_w + o_k[None, :])
        else:
            b_w = tl.load(p_w + o_k[None, :], mask=(o_k < K)[None, :], other=0.0)
        rows = rows + (b_w,)
    totals = ()
    for _ in tl.static_range(BT):
        totals = totals + (tl.zeros([BE, BK], tl.float32),)
    for c in tl.static_range(CHUNKS):
        o_k = (part * CHUNKS + c) * BK + tl.arange(0, BK)
        more = ()
        for t in tl.static_range(BT):
            p_x = x + tl.minimum(t, T - 1) * x_stride
            if EVEN:
                b_x = tl.load(p_x + o_k)
            else:
                b_x = tl.load(p_x + o_k, mask=o_k < K, other=0.0)
            more = more + (totals[t] + rows[c] * b_x.to(tl.float32)[None, :],)
        totals = more
    for t in tl.static_range(BT):
        p_out = logits + (part * T + t) * E + o_e
        tl.store(p_out, tl.sum(totals[t], axis=1), mask=tl.where(o_e < E, T, 0) > t, cache_modifier=".cg")
    if arrive(ticket, tl.num_programs(0) * PARTS):
        select(logits, b_bias, ids, weights, T, scale, E, TOPK, PARTS, BT, BX)


def router_key(tokens: int) -> Hashable:
    """What of ``router`` depends on the number of tokens and chooses a compiled variant."""
    return next(c for c in LAUNCHES if tokens <= c.tokens)


def router(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    topk: int,
    scale: float,
    config: RouterLaunch | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their shares: ids int32 and weights fp32, both [T, topk], best score first.

    x [T, K], at most :data:`MOST_TOKENS` of them; weight fp32 [E, K]; bias fp32 [E], added to the scores for the choice
    alone; weights sum to ``scale``. ValueError for other shapes.
    """
    (tokens, k), experts = x.shape, weight.shape[0]
    if weight.shape[1] != k or bias.shape != (experts,) or x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and bias {tuple(bias.shape)} do not fit")
    if weight.dtype != torch.float32 or bias.dtype != torch.float32 or not 0 < topk <= experts:
        raise ValueError(f"weight and bias must be fp32 of {topk} experts or more")
    c = config or next((c for c in LAUNCHES if tokens <= c.tokens), None)
    if c is None or tokens > c.tokens:
        raise ValueError(f"the router is for {MOST_TOKENS} tokens at most, not {tokens}")
    ids = torch.empty((tokens, topk), dtype=torch.int32, device=x.device)
    weights = torch.empty((tokens, topk), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return ids, weights
    prepare(x.device)
    logits = torch.empty((c.parts, tokens, experts), dtype=torch.float32, device=x.device)
    router_kernel[(triton.cdiv(experts, c.experts), c.parts)](
        x, weight, bias, ids, weights, logits, stream_tickets(1, x.device), tokens, row_stride(x), scale,
        E=experts, K=k, TOPK=topk, PARTS=c.parts, BT=c.tokens, BE=c.experts,
        BK=128 * c.warps, BX=triton.next_power_of_2(experts), num_warps=c.warps,
    )  # fmt: skip
    return ids, weights


def router_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, topk: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in torch: the oracle of ``router``, and the choice a CPU makes."""
    scores = (x.float() @ weight.T).sigmoid()
    ids = (scores + bias).sort(dim=1, descending=True, stable=True)[1][:, :topk]
    chosen = scores.gather(1, ids)
    return ids.to(torch.int32), chosen * (scale / (chosen.sum(1, keepdim=True) + 1e-20))
