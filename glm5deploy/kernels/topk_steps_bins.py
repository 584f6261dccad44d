"""Device functions of `topk_steps`: bins in shared memory, and which of them the k-th best is in.

Those of the first round, and of the few numbers that are left behind the second, are zero from the beginning: such a
round has one barrier. Each tensor of a row has bins of its own: the compiler puts a barrier between additions to the
same memory. Other rounds count what lies in a span, and branch around the addition of each number that does not.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.kernels.topk_steps_device import add, line_layout


@gluon.jit
def zero_bins(count: gl.constexpr, LOG_BINS: gl.constexpr, WARPS: gl.constexpr):
    """2^LOG_BINS empty bins for each of `count` tensors, and as many behind them that nobody reads."""
    LINE: gl.constexpr = gl.SliceLayout(0, line_layout(WARPS, 2**LOG_BINS // 32))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bins = ()
    for _ in gl.static_range(count):
        here = gl.allocate_shared_memory(gl.int32, [2 * 2**LOG_BINS], FLAT)
        here.slice(0, 2**LOG_BINS).store(gl.zeros([2**LOG_BINS], gl.int32, LINE))
        bins += (here,)
    return bins


@gluon.jit
def count_in(bins, b_bin):
    """Count each number in its bin."""
    b_at = gl.ravel(b_bin).to(gl.int32)
    bins.atomic_scatter_add(gl.full(b_at.shape, 1, gl.int32, b_at.type.layout), b_at, 0)


@gluon.jit
def bin_from(b_u, first, shift, LOG_BINS: gl.constexpr):
    """Bins of 2^shift steps from `first` on, and for all other numbers one more behind them."""
    by = shift.to(gl.uint32)
    return gl.minimum(b_u - gl.to_tensor(first).to(gl.uint32), gl.to_tensor(2**LOG_BINS).to(gl.uint32) << by) >> by


@gluon.jit
def held_in(bins, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """int32 [2^LOG_BINS], the same in every warp: what the bins of all tensors hold."""
    LINE: gl.constexpr = gl.SliceLayout(0, line_layout(WARPS, 2**LOG_BINS // 32))
    b_held = bins[0].slice(0, 2**LOG_BINS).load(LINE)
    for part in gl.static_range(1, len(bins)):
        b_held += bins[part].slice(0, 2**LOG_BINS).load(LINE)
    return b_held


@gluon.jit
def histogram(b_bin, m_bin, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """The same for one tensor without bins; m_bin tells which numbers are in one."""
    LINE: gl.constexpr = gl.SliceLayout(0, line_layout(WARPS, 2**LOG_BINS // 32))
    return gl.histogram(gl.ravel(b_bin), 2**LOG_BINS, mask=gl.ravel(m_bin), layout=LINE)


@gluon.jit
def locate(b_held, above, k, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """Which bin the k-th is in, and how many are before it, up to its end and up to the end of all.

    `above` are before all bins. Every warp finds the bin by itself.
    """
    EACH: gl.constexpr = 2**LOG_BINS // 32
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, EACH], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    b_held = gl.convert_layout(gl.reshape(b_held, [1, 32, EACH]), LANES, assert_trivial=True)
    # What is before a lane is added up apart from its own bins, or it would have to ask its neighbour.
    b_lane = gl.convert_layout(gl.sum(b_held, axis=2), line_layout(WARPS), assert_trivial=True)
    b_before = above + gl.associative_scan(b_lane, 1, add) - b_lane
    b_before = gl.convert_layout(b_before, gl.SliceLayout(2, LANES), assert_trivial=True)
    b_reach = b_before[:, :, None] + gl.associative_scan(b_held, 2, add)
    b_short = b_reach < k
    bin = gl.sum(gl.sum(gl.sum(b_short.to(gl.int32), axis=2), axis=1), axis=0)
    before = gl.max(gl.max(gl.max(gl.where(b_short, b_reach, above), axis=2), axis=1), axis=0)
    reach = gl.min(gl.min(gl.min(gl.where(b_short, 0x7FFFFFFF, b_reach), axis=2), axis=1), axis=0)
    return bin, before, reach, above + gl.sum(gl.sum(b_lane, axis=1), axis=0)


@gluon.jit
def ends(b_key, m_key):
    """The least and the largest of the uint32 keys that m_key names, of which there are some."""
    least = gl.min(gl.ravel(gl.where(m_key, b_key, 0xFFFFFFFF)), axis=0)
    return least, gl.max(gl.ravel(gl.where(m_key, b_key, 0)), axis=0)


@gluon.jit
def nearest(steps, first):
    """uint32 [WARPS, 32]: in each thread, how far behind `first` the next step is; those before it wrap around."""
    b_next = gl.min(gl.min(steps[0] - first.to(gl.uint32), axis=3), axis=1)
    for part in gl.static_range(1, len(steps)):
        b_next = gl.minimum(b_next, gl.min(gl.min(steps[part] - first.to(gl.uint32), axis=3), axis=1))
    return b_next


@gluon.jit
def count(steps, bins, above, k, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """Count each step in its bin, and find the k-th best's."""
    for part in gl.static_range(len(steps)):
        count_in(bins[part], steps[part])
    return locate(held_in(bins, WARPS, LOG_BINS), above, k, WARPS, LOG_BINS)


@gluon.jit
def count_between(keys, base, span, by, above, k, WARPS: gl.constexpr, LOG_BINS: gl.constexpr):
    """The same by 2^by keys a bin, of those from base to base + span, in no bins of their own."""
    held = [histogram(((b_key - base) >> by).to(gl.int32), b_key - base <= span, WARPS, LOG_BINS) for b_key in keys]
    b_held = held[0]
    for part in gl.static_range(1, len(held)):
        b_held += held[part]
    return locate(b_held, above, k, WARPS, LOG_BINS)
