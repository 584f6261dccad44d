"""Exact top-k of ragged rows by bisection of the value range in registers.

A program holds up to BLOCK columns of one row. It counts how many reach a threshold, narrows the threshold's range
until exactly k do or one value is left, and writes the survivors in column order; of the columns equal to the
threshold the first ones win. Longer rows take two or more rounds: every block keeps its own k best, which contain
the row's k best, and the next round selects among those. No histogram, no atomics, and the same result every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Columns a program holds in registers: 16 a thread.
BLOCK_COLUMNS = 16384
_WARPS = 32
MAX_K = 4096


@triton.jit
def _ordered_key(b_x):
    """fp32 -> int32 in the same order; -0 counts as 0 and NaN as -inf."""
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    b_key = tl.where(b_bits >= 0, b_bits, b_bits ^ 0x7FFFFFFF)
    return tl.where(b_x == b_x, b_key, -2139095041)


@triton.jit(
    do_not_specialize=["k", "rounds_before"],
    do_not_specialize_on_alignment=["scores", "positions", "starts", "lengths", "keys_out", "positions_out", "topk"],
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
    o_in = i_t * stride_in + i_b * BLOCK + o_c
    if FIRST:
        if HAS_STARTS:
            o_in += tl.load(starts + i_t)
        b_key = _ordered_key(tl.load(scores + o_in, mask=m_c, other=0.0))
    else:
        b_key = tl.load(scores + o_in, mask=m_c, other=0)
    b_key = tl.where(m_c, b_key, -2147483648)  # below the key of -inf

    low = -2147483648
    if n > k:
        # At least k keys reach low, fewer than k reach high.
        low = tl.min(tl.where(m_c, b_key, 2147483647), axis=0)
        high = tl.max(b_key, axis=0) + 1
        reach = n
        while (reach != k) & (high - 1 != low):
            middle = low + ((high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)) >> 1).to(tl.int32)
            count = tl.sum((b_key >= middle).to(tl.int32), axis=0)
            enough = count >= k
            reach = tl.where(enough, count, reach)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)

    m_above = b_key > low
    m_equal = (b_key == low) & m_c
    room = k - tl.sum(m_above.to(tl.int32), axis=0)
    # Both running counts in one scan; each fits 15 bits.
    b_count = tl.cumsum(m_above.to(tl.int32) + (m_equal.to(tl.int32) << 16), axis=0)
    b_equal = b_count >> 16
    m_keep = m_above | (m_equal & (b_equal <= room))
    o_out = (b_count & 0xFFFF) + tl.minimum(b_equal, room) - 1
    if FIRST:
        b_position = i_b * BLOCK + o_c
    else:
        b_position = tl.load(positions + o_in, mask=m_c, other=0)
    if width <= BLOCK:
        p_top = topk + i_t * stride_topk
        tl.store(p_top + o_out, b_position, mask=m_keep)
        tl.store(p_top + o_c, -1, mask=(o_c >= n) & (o_c < k))
    else:
        o_out += i_b * k
        tl.store(keys_out + i_t * stride_out + o_out, b_key, mask=m_keep)
        tl.store(positions_out + i_t * stride_out + o_out, b_position, mask=m_keep)


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
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be fp32 with unit column stride"
    assert 1 <= k <= min(MAX_K, block // 2), f"k must be 1 .. {min(MAX_K, block // 2)}, got {k}"
    assert out.dtype == torch.int32 and out.shape[1] >= k and out.stride(1) == 1, "out must be int32 [T, >= k]"
    kept = _kept_widths(max_length, k, block)
    buffers: list[torch.Tensor] = []
    if kept:
        assert workspace is not None, "rows longer than one block need a workspace"
        sizes = [rows * width for width in kept[:2]]
        assert workspace.numel() >= 2 * sum(sizes), f"workspace must hold {2 * sum(sizes)} int32"
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
            BLOCK=block,
            num_warps=min(_WARPS, max(1, block // 512)),
        )
        source, positions, width = keys_out, positions_out, wide_out
    return out
