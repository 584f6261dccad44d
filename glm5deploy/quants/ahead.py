"""A program's first weights, asked for while the launch ahead of it ends (`glm5deploy/kernels/chain.py`): device code.

They come from memory to the L2 cache, into no register, so nothing has to wait for them or make room.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.quants.scales import half_count, word_count

SUPERS_AHEAD = tl.constexpr(2)
_LINE = tl.constexpr(128)  # bytes


@triton.constexpr_function
def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


@triton.jit
def _ask(plane, sb, n, N, BN: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr):
    """Lines of rows n and on, BN of them, in super-block sb of a plane [S, COUNT, N, WIDTH], BYTES a row."""
    LINES: tl.constexpr = max(1, BN * BYTES // _LINE)
    o = tl.arange(0, _power(COUNT) * LINES)
    part = tl.minimum(o // LINES, COUNT - 1)
    row = tl.minimum(n + o % LINES * (BN // LINES), N - 1)
    at = plane + (tl.cast(N, tl.int64) * sb * COUNT + part * N + row) * WIDTH
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def ask_ahead(
    low, high, words, halves, first, last, n, N, BN: tl.constexpr, FMT: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """The first of super-blocks ``first`` to ``last`` of rows n and on, where launches are chained."""
    WORDS: tl.constexpr = word_count(FMT[3])
    HALVES: tl.constexpr = half_count(FMT[3])
    if CHAINED:
        for k in tl.static_range(SUPERS_AHEAD):
            sb = tl.minimum(first + k, last - 1)
            _ask(low, sb, n, N, BN, FMT[0], 16, 32)
            if FMT[1] > 0:
                _ask(high, sb, n, N, BN, FMT[1], 16, 32)
            if WORDS > 0:
                _ask(words, sb, n, N, BN, WORDS, 1, 4)
            if HALVES > 0:
                _ask(halves, sb, n, N, BN, HALVES, 1, 2)
