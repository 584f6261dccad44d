"""Top-k of rows that no program holds: a threshold from a sample, a pass that lists what reaches it, a selection.

The sample decides about speed alone. A list that overflows is cut to its k best, which raise the threshold; a row in
which fewer than k columns reach the threshold is read again from its start without one.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from glm5deploy.kernels.topk_device import (
    LEAST_KEY,
    NO_KEY,
    columns,
    exclusive_count,
    fours,
    key_value,
    ordered_key,
    row_begin,
    sample_threshold,
    scatter,
    scatter_pairs,
    select_keys,
)


@triton.jit
def load_columns(p_row, column, end, WARPS: tl.constexpr):
    """Numbers of the 512 * WARPS columns behind p_row from `column` on; any number from `end` on."""
    column = tl.multiple_of(column, 4)
    o_x = columns(WARPS)
    left = tl.multiple_of((end + 3) // 4 * 4 - column, 4)
    return tl.load(p_row + column + o_x, mask=o_x < left, other=0.0)


@triton.jit
def collect(b_x, p_held, first, done, width, reach, held, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Append what reaches `reach` among 512 * WARPS columns to a list that has `held` entries and room for as many.

    NaN counts as -inf. b_x are the numbers of the columns from `first` on; those before `done` are passed over. Returns
    how many entries there would be without the list's limit, and the column to go on from when the limit was met.
    """
    SIZE: tl.constexpr = 512 * WARPS
    o_x = first + columns(WARPS)
    # From here on NaN is what is not listed. Most blocks lie within the row, and of their NaN none reaches a number.
    if (first < done) | (first + SIZE > width) | (reach == float("-inf")):
        b_x = tl.where((o_x >= done) & (o_x < width), tl.maximum(b_x, float("-inf")), float("nan"))
    b_new, added = exclusive_count((b_x >= reach).to(tl.int32), WARPS)
    if held + added > SIZE:
        b_x = tl.where(held + b_new < SIZE, b_x, float("nan"))
        last = tl.max(tl.reshape(tl.where(b_x >= reach, o_x, -1), [SIZE]), axis=0)
        done = tl.maximum(done, last + 1)
    scatter_pairs(p_held + held, b_new, b_x, o_x, reach, ASM)
    return held + added, done


@triton.jit
def halves(b_pair):
    """Numbers and positions of list entries."""
    return b_pair.to(tl.int32).to(tl.float32, bitcast=True), (b_pair >> 32).to(tl.int32)


@triton.jit
def best(b_x, m_held, held, least, k, WARPS: tl.constexpr):
    """Keys of 512 * WARPS numbers, of which `held` count; what the k best exceed; how many of those precede each."""
    b_key = tl.where(m_held, ordered_key(b_x), NO_KEY)
    high = tl.max(tl.reshape(b_key, [512 * WARPS]), axis=0)
    b_key, low = select_keys(b_key, held, high, least, k, WARPS, LOG_BINS=8)
    b_out, _count = exclusive_count((b_key > low).to(tl.int32), WARPS)
    return b_key, low, b_out


@triton.jit
def store_best(p_top, b_out, b_position, b_key, low, held, k, WARPS: tl.constexpr, ASM: tl.constexpr):
    """Store the positions whose keys exceed low, and -1 where there are less than k."""
    scatter(p_top, b_out, b_position, b_key, low, ASM)
    if held < k:
        o_c = columns(WARPS)
        tl.store(p_top + o_c, -1, mask=(o_c >= held) & (o_c < k))


@triton.jit(
    do_not_specialize=["k", "chunks", "stride_in"],
    do_not_specialize_on_alignment=["starts", "lengths", "counts"],
)
def topk_parts_kernel(
    logits,  # fp32 [T, stride_in], 16-byte aligned
    starts,  # int32 [T], first column of the row, read when HAS_STARTS
    lengths,  # int32 [T], columns of the row
    counts,  # int64 [T, parts]: entries of a part's list and, in the upper half, the least key that it may have
    lists,  # int64 [T, parts, 512 * WARPS]: a column's bits and, in the upper half, its position
    k,
    chunks,  # of 512 * WARPS columns that a part has
    stride_in,
    HAS_STARTS: tl.constexpr,
    WARPS: tl.constexpr,  # of this launch
    SAMPLE: tl.constexpr,
    ASM: tl.constexpr,
    EARLY: tl.constexpr,  # the next kernel may start while this one runs
):
    """Lists what reaches the row's threshold, one list a part; a list with a count above 512 * WARPS is not whole."""
    SIZE: tl.constexpr = 512 * WARPS
    let_next_begin(EARLY)  # at once: this launch begins when all before it have ended
    i_t = tl.program_id(0).to(tl.int64)
    i_p = tl.program_id(1)
    width, o_row, before = row_begin(starts, lengths, i_t, stride_in, HAS_STARTS)
    p_row = logits + o_row
    column = i_p * chunks * SIZE
    end = tl.minimum(column + chunks * SIZE, before + width)
    o_list = i_t * tl.num_programs(1) + i_p
    held = 0
    done = 0
    least = tl.full((), LEAST_KEY, tl.int32)
    if column < end:
        b_next = load_columns(p_row, column, end, WARPS)  # on their way while the sample is looked at
        if width > SIZE:
            least = sample_threshold(p_row, before, width, k, SAMPLE)
        reach = key_value(least)
        while column < end:
            b_x = b_next
            b_next = load_columns(p_row, column + SIZE, end, WARPS)
            held, done = collect(b_x, lists + o_list * SIZE, column - before, done, width, reach, held, WARPS, ASM)
            column += SIZE
    tl.store(counts + o_list, (least.to(tl.int64) << 32) | held)


@triton.jit(
    do_not_specialize=["k", "parts", "stride_in", "stride_topk"],
    do_not_specialize_on_alignment=["starts", "lengths", "topk", "counts"],
)
def topk_stream_kernel(
    logits,  # fp32 [T, stride_in], 16-byte aligned
    starts,  # int32 [T], first column of the row, read when HAS_STARTS
    lengths,  # int32 [T], columns of the row
    counts,  # what topk_parts_kernel left, read when PARTS
    lists,
    held_pairs,  # int64 [T, 512 * WARPS], scratch
    topk,  # int32 [T, stride_topk]
    k,  # less than 512 * WARPS
    parts,
    stride_in,
    stride_topk,
    HAS_STARTS: tl.constexpr,
    WARPS: tl.constexpr,  # of this launch
    SAMPLE: tl.constexpr,
    PARTS: tl.constexpr,  # 0, or a power of two that is at least `parts`
    LIST: tl.constexpr,  # entries of a part's list
    ASM: tl.constexpr,
    EARLY: tl.constexpr,  # started while topk_parts_kernel runs
):
    SIZE: tl.constexpr = 512 * WARPS
    i_t = tl.program_id(0).to(tl.int64)
    width, o_row, before = row_begin(starts, lengths, i_t, stride_in, HAS_STARTS)
    p_row, end = logits + o_row, before + width
    p_held = held_pairs + i_t * SIZE
    p_top = topk + i_t * stride_topk
    o_c = columns(WARPS)
    least = tl.full((), LEAST_KEY, tl.int32)  # no entry of the list is less
    column = 0
    done = 0  # columns before this one have been looked at
    held = 0
    pending = 1
    if PARTS > 0:
        # The program is shared out evenly among the lists.
        share = tl.multiple_of(SIZE // parts // 4 * 4, 4)
        o_part = fours(WARPS) // share
        o_entry = fours(WARPS) - o_part * share + tl.arange(0, 4)[None, None, None, :]
        m_part = o_part < parts
    wait_for_previous(EARLY)
    if PARTS > 0:
        o_p = tl.arange(0, PARTS)
        b_told = tl.load(counts + i_t * parts + o_p, mask=o_p < parts, other=0)
        # The first entries of each list, asked for before it is known how many it has.
        b_size = tl.load(counts + i_t * parts + o_part, mask=m_part, other=0).to(tl.int32)
        b_pair = tl.load(lists + (i_t * parts + o_part) * LIST + o_entry, mask=m_part, other=0)
        b_count = b_told.to(tl.int32)
        most = tl.max(b_count, axis=0)
        total = tl.sum(b_count, axis=0)
        b_room = (b_count + 3) // 4 * 4
        if (most <= LIST) & (tl.sum(b_room, axis=0) <= SIZE) & (total >= tl.minimum(k, width)):
            if most > share:
                # One list behind the other, each from a multiple of four on: which one each four entries are of is
                # found by halves among where lists begin. Lists that are not there begin behind all others.
                tl.store(p_held + o_p, tl.cumsum(b_room, axis=0) - b_room)
                tl.debug_barrier()
                o_part = tl.zeros_like(o_part)
                b_begin = tl.zeros_like(o_part)
                for step in tl.static_range(1, 6):
                    if (PARTS >> step) > 0:
                        o_next = o_part + (PARTS >> step)
                        b_next_begin = tl.load(p_held + o_next).to(tl.int32)
                        m_next = b_next_begin <= fours(WARPS)
                        o_part = tl.where(m_next, o_next, o_part)
                        b_begin = tl.where(m_next, b_next_begin, b_begin)
                o_four = tl.multiple_of(fours(WARPS) - b_begin, [1, 1, 1, 4])
                o_entry = o_four + tl.arange(0, 4)[None, None, None, :]
                b_size = tl.load(counts + i_t * parts + o_part, mask=o_part < parts, other=0).to(tl.int32)
                b_pair = tl.load(lists + (i_t * parts + o_part) * LIST + o_entry, mask=o_four < b_size, other=0)
            column = (end + 3) // 4 * 4
            least = tl.max(tl.where(b_count > 0, (b_told >> 32).to(tl.int32), LEAST_KEY), axis=0)
            b_x, b_position = halves(b_pair)
            b_key, low, b_out = best(b_x, o_entry < b_size, total, least, k, WARPS)
            store_best(p_top, b_out, b_position, b_key, low, total, k, WARPS, ASM)
            pending = 0
    b_next = load_columns(p_row, column, end, WARPS)
    if (column == 0) & (width > SIZE):
        least = sample_threshold(p_row, before, width, k, SAMPLE)
    next_key = least  # the least key that may still be listed
    while pending == 1:
        reach = key_value(next_key)
        fits = 1
        while (fits == 1) & (column < end):
            b_x = b_next
            b_next = load_columns(p_row, column + SIZE, end, WARPS)
            held, done = collect(b_x, p_held, column - before, done, width, reach, held, WARPS, ASM)
            if held <= SIZE:
                column += SIZE
            else:
                fits = 0
                held = SIZE
        if (fits == 1) & (held < tl.minimum(k, width)):
            # The sample promised too much: start again, without it.
            least = tl.full((), LEAST_KEY, tl.int32)
            next_key = least
            column = 0
            done = 0
            held = 0
        else:
            # What was written by other threads is read, and read before it is overwritten.
            tl.debug_barrier()
            b_x, b_position = halves(tl.load(p_held + o_c))
            b_key, low, b_out = best(b_x, o_c < held, held, least, k, WARPS)
            if fits == 0:
                b_x = tl.where(b_key > low, b_x, float("nan"))
                tl.debug_barrier()
                scatter_pairs(p_held, b_out, b_x, b_position, tl.full((), float("-inf"), tl.float32), ASM)
                tl.debug_barrier()
                # Later columns that equal the k-th best lose to it.
                least = low + 1
                next_key = low + 2
                held = k
            else:
                store_best(p_top, b_out, b_position, b_key, low, held, k, WARPS, ASM)
                pending = 0
        b_next = load_columns(p_row, column, end, WARPS)
