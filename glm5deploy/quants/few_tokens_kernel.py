"""Experts of few tokens: the shared expert is one more slot of the routed ones' launches; one token chooses in them.

The programs of slot 0 take the shared expert, whose pairs are numbered behind all others: token t has pair P + t. Its
types are its own, its hidden units as many as a routed expert's. One token's experts need no launch before these: each
program finds its slot's expert among the router's logits. What lies between the two launches then are ids and scores;
the second makes weights of these.
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
from glm5deploy.quants.moe_kernel import down_tile, gate_up_tile, pair_weights, pairs_of

_LEAST = tl.constexpr(-(2**31))  # below every score


@triton.jit
def ordered(score):
    """Numbers int32 in the order of scores fp32, and above :data:`_LEAST`; NaN is above or below all."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.maximum(tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _LEAST + 1)


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
def expert_of_rank(
    logits, bias, rank, FIRST, E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The expert with ``rank`` greater scores, bias added, among E (EX: a power of two, 32 or more); ties by number.

    Every warp looks at all experts, so that none waits for another. Keys are integers because a warp's greatest integer
    is one instruction. It is one where neighbouring threads have neighbouring experts, which FIRST sees to: it is 0,
    but as that is not known when a kernel is compiled, loads are not widened to four experts a thread.
    """
    o_e = FIRST + tl.arange(0, EX // 32)[:, None, None] * 32 + tl.arange(0, 32)[None, None, :]
    o_e += tl.zeros([1, WARPS, 1], tl.int32)
    m_e = o_e < E
    more = tl.load(bias + o_e, mask=m_e, other=0.0)  # a weight, which comes from memory: not in any cache
    wait_for_previous(CHAINED)
    score = score_of(tl.load(logits + o_e, mask=m_e, other=0.0), PTX)
    keys = tl.where(m_e, ordered(score + more), _LEAST)
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


@triton.jit
def _ask_plane(plane, e, BYTES):
    """This program's share of expert e's BYTES of a plane."""
    programs = tl.num_programs(0) * tl.num_programs(2)
    mine = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    last = (mine + 1) * (BYTES // 128) // programs
    start = plane.to(tl.int64, bitcast=True) + tl.cast(BYTES, tl.int64) * e
    for first in range(mine * (BYTES // 128) // programs, last, 64):
        o = tl.minimum(first + tl.arange(0, 64), last - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [start + o.to(tl.int64) * 128], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def ask_expert(low, high, words, halves, e, LOW, HIGH, WORDS, HALVES):
    """Of the second product's weights of expert e, what is this slot's program's to ask for: bytes of each plane."""
    _ask_plane(low, e, LOW)
    _ask_plane(high, e, HIGH)
    _ask_plane(words, e, WORDS)
    _ask_plane(halves, e, HALVES)


@triton.jit
def _routed_pairs(
    ids, scores, logits, bias, slot, P, FIRST, E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr,
    PAIRS: tl.constexpr, BM: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """As ``pairs_of``; where E is not 0, one token's, chosen here, and one program of each slot writes id and score."""
    if E > 0:
        expert = expert_of_rank(logits, bias, slot, FIRST, E, EX, WARPS, PTX, CHAINED)
        if (tl.program_id(0) == 0) & (tl.program_id(2) == 0):
            tl.store(ids + slot, expert)
            tl.store(scores + slot, score_of(tl.load(logits + expert), PTX))
        return slot + tl.zeros([BM], tl.int32), 1, expert
    else:
        wait_for_previous(CHAINED)
        return pairs_of(ids, ids, ids, slot, P, PAIRS, BM)


@triton.jit(
    do_not_specialize=[
        "P", "T", "FIRST", "SUPERS", "PARTS", "LOW", "HIGH", "WORDS", "HALVES", "S_LOW", "S_HIGH", "S_WORDS", "S_HALVES"
    ]
)  # fmt: skip
def few_gate_up_kernel(
    x, gl, gh, gw, gs, ul, uh, uw, us, al, ah, aw, a_s, bl, bh, bw, bs, ids, scores, logits, bias,
    dl, dh, dw, ds, el, eh, ew, es, hidden, parts, tickets, P, T, FIRST, N, ROWS, UP, K, x_stride, SUPERS, PARTS,
    LOW, HIGH, WORDS, HALVES, S_LOW, S_HIGH, S_WORDS, S_HALVES, AHEAD: tl.constexpr,
    G: tl.constexpr, U: tl.constexpr, A: tl.constexpr, B: tl.constexpr, TOPK: tl.constexpr,
    E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, PAIRS: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """hidden [P + T, N] = silu(gate x) * up x; gate and up of types G and U, of the shared expert A and B.

    Grid (N tiles, 1 + P, PARTS). parts fp32 [PARTS, P + T, 2N]; tickets int32 [P + 1, N tiles], zero. The shared
    expert's planes have ROWS rows, and up begins at UP. E > 0: ids and scores [TOPK] are written, else ids are read.
    """
    item = tl.program_id(1)
    if item == 0:
        part, n = tl.program_id(2), tl.program_id(0) * BN
        first, last = part * SUPERS // PARTS, (part + 1) * SUPERS // PARTS
        ask_ahead(al, ah, aw, a_s, first, last, n, ROWS, BN, A, CHAINED)
        ask_ahead(bl, bh, bw, bs, first, last, UP + n, ROWS, BN, B, CHAINED)
        wait_for_previous(CHAINED)
        m = tl.arange(0, BM)
        if AHEAD == 1:
            ask_expert(el, eh, ew, es, 0, S_LOW, S_HIGH, S_WORDS, S_HALVES)
        gate_up_tile(
            x, al, ah, aw, a_s, bl, bh, bw, bs, hidden, parts, tickets, m, P + m, T, 0, P + T, N, ROWS, UP, K,
            x_stride, SUPERS, PARTS, A, B, BN, BM, STAGES, EVEN, PTX, CHAINED,
        )  # fmt: skip
        if AHEAD == 2:
            ask_expert(el, eh, ew, es, 0, S_LOW, S_HIGH, S_WORDS, S_HALVES)
    else:
        pairs, count, e = _routed_pairs(
            ids, scores, logits, bias, item - 1, P, FIRST, E, EX, WARPS, PAIRS, BM, PTX, CHAINED
        )
        if count > 0:
            if AHEAD == 1:
                ask_expert(dl, dh, dw, ds, e, LOW, HIGH, WORDS, HALVES)
            gate_up_tile(
                x, gl, gh, gw, gs, ul, uh, uw, us, hidden, parts, tickets, pairs // TOPK, pairs, count, e, P + T, N,
                N, 0, K, x_stride, SUPERS, PARTS, G, U, BN, BM, STAGES, EVEN, PTX, CHAINED,
            )  # fmt: skip
            if AHEAD == 2:
                ask_expert(dl, dh, dw, ds, e, LOW, HIGH, WORDS, HALVES)


@triton.jit(do_not_specialize=["P", "T", "SUPERS", "TILES"])
def few_down_kernel(
    hidden, low, high, words, halves, al, ah, aw, a_s, ids, weights, terms, scale, P, T, N, K, SUPERS, TILES,
    FMT: tl.constexpr, A: tl.constexpr, TOPK: tl.constexpr, SCORES: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    PAIRS: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, PTX: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """terms [P + T, N] = weight * (down hidden), the shared expert's of type A and weight one. ONE: SUPERS is 1.

    SCORES (a power of two, TOPK or more; 0: weights are weights): weights are one token's scores, which are divided by
    their sum and 1e-20 and multiplied by ``scale``. Grid (spans of TILES * BN outputs, 1 + P).
    """
    item = tl.program_id(1)
    if item == 0:
        ask_ahead(al, ah, aw, a_s, 0, SUPERS, tl.program_id(0) * TILES * BN, N, BN, A, CHAINED)
        wait_for_previous(CHAINED)
        m = tl.arange(0, BM)
        down_tile(
            hidden, al, ah, aw, a_s, tl.full([BM], 1.0, tl.float32), terms, P + m, T, 0, N, K, SUPERS, TILES,
            A, BN, BM, STAGES, ONE, EVEN, PTX, CHAINED,
        )  # fmt: skip
    else:
        wait_for_previous(CHAINED)
        pairs, count, e = pairs_of(ids, ids, ids, item - 1, P, PAIRS, BM)
        if count > 0:
            share = pair_weights(weights, pairs, count, BM)
            if SCORES > 0:
                o_s = tl.arange(0, SCORES)
                total = tl.sum(tl.load(weights + o_s, mask=o_s < TOPK, other=0.0), 0)
                share = share * scale / (total + 1e-20)
            down_tile(
                hidden, low, high, words, halves, share, terms, pairs, count, e, N, K, SUPERS, TILES,
                FMT, BN, BM, STAGES, ONE, EVEN, PTX, CHAINED,
            )  # fmt: skip
