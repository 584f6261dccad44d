"""Parts of K that several programs sum, and their sum by the last: linear_kernel.py's functions in Gluon."""

# Gluon reads these functions: tuples grow by addition.
# ruff: noqa: RUF005
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from glm5deploy.quants.launch import MOST_PARTS as _MOST_PARTS

MOST_PARTS = gl.constexpr(_MOST_PARTS)


@gluon.jit
def arrive(ticket, ARRIVALS):
    """Publish this program's stores and count it at a ticket; true for the last of ARRIVALS, which resets it."""
    gl.barrier()  # all threads' stores come before this program's ticket
    last = gl.atomic_add(ticket, 1, sem="acq_rel") == ARRIVALS - 1
    gl.barrier()
    if last:
        gl.store(ticket, 0)
    return last


@gluon.jit
def add_parts(at, stride, ok, PARTS):
    """Sum of the at most MOST_PARTS parts stored at ``at`` + part * stride, in order; all are asked for at once."""
    parts = ()
    for p in gl.static_range(MOST_PARTS):
        parts = parts + (gl.load(at + p * stride, mask=ok & (p < PARTS), other=0.0, cache_modifier=".cg"),)
    total = parts[0]
    for p in gl.static_range(1, MOST_PARTS):
        total += parts[p]
    return total
