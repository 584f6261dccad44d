"""One token's experts: the shared expert is one more of the routed ones' launches, and they are chosen there.

The programs of slot 0 take the shared expert. Its types are its own, its hidden units as many as a routed expert's. No
launch before these two chooses: each program finds its slot's expert among the router's logits. What lies between the
two are ids and scores, and the second makes weights of these.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# Triton reads these functions: branches on constants need their else, comparisons their plain form.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from glm5deploy.kernels.chain import wait_for_previous
from glm5deploy.quants.ahead import ask_ahead
from glm5deploy.quants.moe_kernel import down_tile, gate_up_tile

_LEAST = tl.constexpr(-(2**31))  # below every score


@triton.jit
def ordered(score):
    """Numbers int32 in the order of scores fp32; NaN is above or below all."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(logits, PTX: tl.constexpr):
    """Sigmoids, in the form in which vLLM's router has them: those that it takes to be equal are equal here."""
    if PTX:
        return 0.5 * libdevice.tanh(0.5 * logits) + 0.5
    else:
        return tl.sigmoid(logits)


@triton.jit
def _greatest(keys):
    """Of [X, WARPS, 32], each warp's greatest: a warp's 32 are compared by one instruction, others by none."""
    return tl.max(tl.max(keys, 0), 1)[None, :, None]


@triton.jit
def _first(hit, o_e, EX: tl.constexpr):
    """The first of ``o_e`` where ``hit``."""
    return tl.min(tl.min(tl.where(hit, o_e, EX), 0), 1)[None, :, None]


@triton.jit
def _load(at, o_e, E: tl.constexpr, EX: tl.constexpr):
    if E == EX:
        return tl.load(at)
    else:
        return tl.load(at, mask=o_e < E, other=0.0)


@triton.jit
def expert_of_rank(
    logits, bias, rank, FIRST, E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The expert with ``rank`` greater scores, bias added, among E (EX: a power of two, 32 or more); ties by number.

    Every warp looks at all experts, so that none waits for another. Keys are integers because a warp's greatest integer
    is one instruction. It is one where neighbouring threads have neighbouring experts, which FIRST sees to: it is 0,
    but as that is not known when a kernel is compiled, loads are not widened to four experts a thread.
    """
    lanes = FIRST + tl.arange(0, 32)[None, None, :] + tl.zeros([1, WARPS, 1], tl.int32)
    steps = tl.arange(0, EX // 32)[:, None, None] * 32
    o_e = lanes + steps
    more = _load((bias + lanes) + steps, o_e, E, EX)  # a weight, which comes from memory: not in any cache
    wait_for_previous(CHAINED)
    keys = ordered(score_of(_load((logits + lanes) + steps, o_e, E, EX), PTX) + more)
    if E < EX:
        keys = tl.where(o_e < E, keys, _LEAST)
    rest = keys
    top = _greatest(rest)
    for _ in range(rank):  # as if no two were equal
        rest = tl.where(rest == top, _LEAST, rest)
        top = _greatest(rest)
    above = tl.sum(tl.sum((keys > top).to(tl.int32), 0), 1)
    expert = _first(keys == top, o_e, EX)
    if tl.max(above, 0) != rank:  # there are: one by one
        rest = keys
        for _ in range(rank + 1):
            expert = _first(rest == _greatest(rest), o_e, EX)
            rest = tl.where(o_e == expert, _LEAST, rest)
    return tl.max(tl.max(tl.max(expert, 2), 1), 0)


@triton.jit(do_not_specialize=["FIRST", "SUPERS", "PARTS"])
def one_gate_up_kernel(
    x, gl, gh, gw, gs, ul, uh, uw, us, al, ah, aw, a_s, bl, bh, bw, bs, ids, scores, logits, bias,
    hidden, parts, tickets, FIRST, N, ROWS, UP, K, SUPERS, PARTS,
    G: tl.constexpr, U: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """hidden [1 + TOPK, N] = silu(gate x) * up x of types G and U, in row 0 the shared expert's of types A and B.

    Grid (N tiles, 1 + TOPK, PARTS). parts fp32 [PARTS, 1 + TOPK, 2N]; tickets int32 [1 + TOPK, N tiles], zero. The
    shared expert's planes have ROWS rows, and up begins at UP. ids int32 and scores fp32 [TOPK] are written.
    """
    slot, slots = tl.program_id(1), tl.num_programs(1)
    token = tl.zeros([BM], tl.int32)
    if slot == 0:
        part, n = tl.program_id(2), tl.program_id(0) * BN
        first, last = part * SUPERS // PARTS, (part + 1) * SUPERS // PARTS
        ask_ahead(al, ah, aw, a_s, first, last, n, ROWS, BN, A, CHAINED)
        ask_ahead(bl, bh, bw, bs, first, last, UP + n, ROWS, BN, B, CHAINED)
        wait_for_previous(CHAINED)
        gate_up_tile(
            x, al, ah, aw, a_s, bl, bh, bw, bs, hidden, parts, tickets, token, token, 1, 0, slots, N, ROWS, UP, K,
            0, SUPERS, PARTS, A, B, BN, BM, STAGES, EVEN, PTX, CHAINED,
        )  # fmt: skip
    else:
        expert = expert_of_rank(logits, bias, slot - 1, FIRST, E, EX, WARPS, PTX, CHAINED)
        if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
            tl.store(ids + slot - 1, expert)
            tl.store(scores + slot - 1, score_of(tl.load(logits + expert), PTX))
        gate_up_tile(
            x, gl, gh, gw, gs, ul, uh, uw, us, hidden, parts, tickets, token, token + slot, 1, expert, slots, N, N, 0,
            K, 0, SUPERS, PARTS, G, U, BN, BM, STAGES, EVEN, PTX, CHAINED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["SUPERS", "TILES"])
def one_down_kernel(
    hidden, low, high, words, halves, al, ah, aw, a_s, ids, scores, terms, scale, N, K, SUPERS, TILES,
    FMT: tl.constexpr, A: tl.constexpr, TOPK: tl.constexpr, SCORES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """terms [1 + TOPK, N] = weight * (down hidden), in row 0 the shared expert's of type A and weight one.

    Weights are scores over their sum and 1e-20, times ``scale``. SCORES: a power of two, TOPK or more; ONE: SUPERS is
    1. Grid (spans of TILES * BN outputs, 1 + TOPK).
    """
    slot = tl.program_id(1)
    row = slot + tl.zeros([BM], tl.int32)
    if slot == 0:
        ask_ahead(al, ah, aw, a_s, 0, SUPERS, tl.program_id(0) * TILES * BN, N, BN, A, CHAINED)
        wait_for_previous(CHAINED)
        down_tile(
            hidden, al, ah, aw, a_s, tl.full([BM], 1.0, tl.float32), terms, row, 1, 0, N, K, SUPERS, TILES,
            A, BN, BM, STAGES, ONE, EVEN, PTX, CHAINED,
        )  # fmt: skip
    else:
        wait_for_previous(CHAINED)
        o_s = tl.arange(0, SCORES)
        total = tl.sum(tl.load(scores + o_s, mask=o_s < TOPK, other=0.0), 0)
        weight = tl.load(scores + slot - 1) * scale / (total + 1e-20)
        down_tile(
            hidden, low, high, words, halves, weight + tl.zeros([BM], tl.float32), terms, row, 1,
            tl.load(ids + slot - 1), N, K, SUPERS, TILES, FMT, BN, BM, STAGES, ONE, EVEN, PTX, CHAINED,
        )  # fmt: skip
