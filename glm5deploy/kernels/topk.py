"""Exact top-k of ragged rows, the row's values held in registers.

A program holds up to BLOCK columns of one row. It narrows the range of the k-th largest value, by counting how many
values reach each of four pivots, until exactly k reach its lower end or one value is left; then it writes the
survivors in column order, and of the columns equal to the threshold the first ones win. Longer rows take two or more
rounds: every block keeps its own k best, which contain the row's k best, and the next round selects among those.
Nothing is shared between programs, so the result is the same every time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.kernels.layout import require

# Columns a program holds in registers.
BLOCK_COLUMNS = 8192
MAX_K = 4096


@triton.jit
def _ordered_key(b_x):
    """fp32 -> int32 in the same order; -0 counts as 0 and NaN as -inf."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    b_key = tl.where(b_bits >= 0, b_bits, b_bits ^ 0x7FFFFFFF)
    return tl.where(b_x == b_x, b_key, -2139095041)


@triton.jit
def _key_value(key):
    """The fp32 number of a key."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _clamped_key(value, least, most):
    """Key of an fp32 number, NaN included, moved into least .. most."""
    return tl.minimum(tl.maximum(_ordered_key(value), least), most)


@triton.jit
def _narrow(low, high, reach, above, pivot, count, k):
    """Bounds of the k-th largest key and the counts that belong to them, after `count` keys reached `pivot`."""
    rise = (count >= k) & (pivot > low)
    fall = (count < k) & (pivot < high)
    return (
        tl.where(rise, pivot, low),
        tl.where(fall, pivot, high),
        tl.where(rise, count, reach),
        tl.where(fall, count, above),
    )


@triton.jit(
    do_not_specialize=["k", "rounds_before", "stride_in", "stride_out", "stride_topk"],
    do_not_specialize_on_alignment=["positions", "starts", "lengths", "keys_out", "positions_out", "topk"],
)
def topk_kernel(
    scores,  # first round: logits fp32 [T, stride_in]; later: keys int32 that the round before kept
    positions,  # later rounds: int32 [T, stride_in], the columns these keys come from
    starts,  # int32 [T], first column of the row, read when HAS_STARTS
    lengths,  # int32 [T], columns of the row
    keys_out,  # int32 [T, stride_out], k for each block, when the row needs another round
    positions_out,  # int32 [T, stride_out]
    topk,  # int32 [T, stride_topk], when this round is the row's last
    k,
    rounds_before,
    stride_in,
    stride_out,
    stride_topk,
    FIRST: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows start at multiples of 16 bytes
    BLOCK: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    i_b = tl.program_id(1)
    o_c = tl.arange(0, BLOCK)
    width = tl.load(lengths + i_t)
    for _ in range(rounds_before):
        # A row that fitted one block is finished; else each block left k entries, the last one perhaps fewer.
        last = (width - 1) // BLOCK
        width = tl.where(width <= BLOCK, -1, last * k + tl.minimum(k, width - last * BLOCK))
    # The first block of an unfinished row always runs: it pads an empty row.
    if (width < 0) | ((i_b > 0) & (i_b * BLOCK >= width)):
        return
    n = tl.minimum(width - i_b * BLOCK, BLOCK)
    m_c = o_c < n
    o_in = i_t * stride_in
    if ALIGNED:
        o_in = tl.multiple_of(o_in, 4)
    o_in += i_b * BLOCK + o_c
    m_in = m_c
    if ALIGNED:
        # Whole groups of four, which stay within the row's stride: a mask in fours lets a thread load them at once.
        m_in = o_c < tl.multiple_of((n + 3) // 4 * 4, 4)
    if FIRST:
        if HAS_STARTS:
            o_in += tl.load(starts + i_t)
        b_key = _ordered_key(tl.load(scores + o_in, mask=m_in, other=0.0))
    else:
        b_key = tl.load(scores + o_in, mask=m_in, other=0)
    b_key = tl.where(m_c, b_key, -2147483648)  # below the key of -inf

    low = -2147483648
    above = n
    if n > k:
        # Invariant: `reach` keys, at least k, are low or more; `above`, fewer than k, are high or more.
        low = tl.min(tl.where(m_c, b_key, 2147483647), axis=0)
        high = tl.max(b_key, axis=0) + 1
        reach = n
        above = 0
        turn = 0
        while (reach != k) & (high - 1 != low):
            least, most = low + 1, high - 1
            low_value = _key_value(low)
            span = _key_value(high) - low_value
            step = (high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)) // 5
            if (turn % 3 != 2) & (span < 3.0e38):
                # Where a straight line between the two known counts reaches k, with a narrow and a wide margin.
                guess = low_value + span * ((reach - k + 0.5) / (reach - above))
                pivot1 = _clamped_key(guess - span * 0.125, least, most)
                pivot2 = _clamped_key(guess - span * 0.015625, least, most)
                pivot3 = _clamped_key(guess + span * 0.015625, least, most)
                pivot4 = _clamped_key(guess + span * 0.125, least, most)
            else:
                # Equal fifths of the keys: this alone ends after 14 rounds, whatever the values.
                pivot1 = tl.maximum(low + step.to(tl.int32), least)
                pivot2 = tl.maximum(low + (2 * step).to(tl.int32), least)
                pivot3 = tl.maximum(low + (3 * step).to(tl.int32), least)
                pivot4 = tl.maximum(low + (4 * step).to(tl.int32), least)
            # Four counts of at most 16 bits in one reduction.
            b_pair = (b_key >= pivot1).to(tl.int32) + ((b_key >= pivot2).to(tl.int32) << 16)
            b_pair2 = (b_key >= pivot3).to(tl.int32) + ((b_key >= pivot4).to(tl.int32) << 16)
            counts = tl.sum(b_pair.to(tl.int64) + (b_pair2.to(tl.int64) << 32), axis=0)
            low, high, reach, above = _narrow(low, high, reach, above, pivot1, (counts & 0xFFFF).to(tl.int32), k)
            low, high, reach, above = _narrow(
                low, high, reach, above, pivot2, ((counts >> 16) & 0xFFFF).to(tl.int32), k
            )
            low, high, reach, above = _narrow(
                low, high, reach, above, pivot3, ((counts >> 32) & 0xFFFF).to(tl.int32), k
            )
            low, high, reach, above = _narrow(low, high, reach, above, pivot4, (counts >> 48).to(tl.int32), k)
            turn += 1
        # When k keys reach low, all of them are taken, those equal to it too.
        above = tl.where(reach == k, k, above)
        low = tl.where(reach == k, low - 1, low)

    m_above = b_key > low
    m_equal = (b_key == low) & m_c
    room = k - above
    # Both running counts in one scan; each fits 15 bits.
    b_count = tl.cumsum(m_above.to(tl.int32) + (m_equal.to(tl.int32) << 16), axis=0)
    b_equal = b_count >> 16
    m_keep = m_above | (m_equal & (b_equal <= room))
    o_out = (b_count & 0xFFFF) + tl.minimum(b_equal, room) - 1
    b_position = i_b * BLOCK + o_c if FIRST else tl.load(positions + o_in, mask=m_c, other=0)
    if width <= BLOCK:
        p_top = topk + i_t * stride_topk
        tl.store(p_top + o_out, b_position, mask=m_keep)
        tl.store(p_top + o_c, -1, mask=(o_c >= n) & (o_c < k))
    else:
        o_out += i_b * k
        tl.store(keys_out + i_t * stride_out + o_out, b_key, mask=m_keep)
        tl.store(positions_out + i_t * stride_out + o_out, b_position, mask=m_keep)


def block_warps(block: int) -> int:
    """Warps of a program: 32 columns a thread."""
    return max(1, block // 1024)


def _kept_widths(width: int, k: int, block: int) -> list[int]:
    """Entries a row that started with `width` columns can have after each round but the last."""
    widths = []
    while width > block:
        width = -(-width // block) * k
        widths.append(width)
    return widths


def topk_workspace_elements(rows: int, max_length: int, k: int, block: int = BLOCK_COLUMNS) -> int:
    """int32 elements `select_topk` needs for `rows` rows of at most `max_length` columns; 0 up to one block."""
    return 2 * rows * sum(_kept_widths(max_length, k, block)[:2])


def select_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    max_length: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    block: int = BLOCK_COLUMNS,
) -> torch.Tensor:
    """`reference.select_topk` on the GPU: exact, ties by lower position, ascending, -1 padded.

    Args:
        logits: fp32 [T, S], unit column stride. lengths: int32 [T]. starts: int32 [T], zeros when absent.
        k: 1 .. 4096. max_length: no length exceeds it; it fixes the launches, so a captured graph serves all lengths.
        out: int32 [T, >= k], unit column stride; the first k columns are written.
        workspace: int32, `topk_workspace_elements` of it, when max_length exceeds one block.
    """
    rows = logits.shape[0]
    require(logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be fp32 with unit column stride")
    require(1 <= k <= min(MAX_K, block // 2), f"k must be 1 .. {min(MAX_K, block // 2)}, got {k}")
    require(out.dtype == torch.int32 and out.shape[1] >= k and out.stride(1) == 1, "out must be int32 [T, >= k]")
    kept = _kept_widths(max_length, k, block)
    buffers: list[torch.Tensor] = []
    if kept:
        if workspace is None:
            raise ValueError("rows longer than one block need a workspace")
        sizes = [rows * width for width in kept[:2]]
        require(workspace.numel() >= 2 * sum(sizes), f"workspace must hold {2 * sum(sizes)} int32")
        for size in sizes:
            buffers += [workspace[:size], workspace[size : 2 * size]]
            workspace = workspace[2 * size :]
    if rows == 0:
        return out
    source, positions, width = logits, out, logits.stride(0)
    for index, wide in enumerate([max_length, *kept]):
        last = index == len(kept)
        # Later rounds alternate between the two pairs of buffers; a pair is free once its round has been read.
        pair = 2 * (index % 2)
        keys_out, positions_out = (out, out) if last else (buffers[pair], buffers[pair + 1])
        wide_out = 0 if last else kept[index]
        topk_kernel[(rows, max(1, triton.cdiv(wide, block)))](
            source,
            positions,
            lengths if starts is None else starts,
            lengths,
            keys_out,
            positions_out,
            out,
            k,
            index,
            width,
            wide_out,
            out.stride(0),
            FIRST=index == 0,
            HAS_STARTS=index == 0 and starts is not None,
            ALIGNED=starts is None and width % 4 == 0,
            BLOCK=block,
            num_warps=block_warps(block),
        )
        source, positions, width = keys_out, positions_out, wide_out
    return out
