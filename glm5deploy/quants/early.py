"""Launches that begin before the ones ahead of them have ended (programmatic dependent launch, SM90 on): device code.

A launch with Triton's option ``launch_pdl`` may begin once every program of the launch ahead has called ``let_next`` or
ended. What makes that safe, for whatever runs before and after:

- Every kernel here calls ``wait_for_previous`` in every program. It returns when the launches ahead have ended and what
  they wrote is visible; since each of those waited likewise, everything before them has ended too, so a chain of early
  launches is in order, and memory that the allocator deals out again has no reader left.
- Before it returns a program reads planes, and nothing else: weights, which nobody writes while products run. What
  fills planes is to be followed by a wait of the host, or by any launch without the option, before the first product.
- It returns a zero that Triton and LLVM do not know. Pointers to activations, ids, counters and parts are used with
  that zero added, so neither moves such a read ahead of it. The assembler does know it, and keeps memory accesses
  behind ``griddepcontrol.wait`` as behind any barrier. Writes follow reads that depend on it.
- Kernels that know nothing of this, before: they let the next launch begin as they end. After: a launch without the
  option waits for the whole launch ahead, and another project's early kernel waits in itself, as it must behind any
  kernel. Other streams: an event waits for whole launches; in a captured graph, edges
  from a kernel to an early launch are those that ``wait_for_previous`` waits for.
- Waiting programs hold their place on a multiprocessor. All programs of the launch ahead have theirs by then, so it
  ends whatever these hold.
"""

# Triton reads these functions: branches on constants need their else.
# ruff: noqa: RET505
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def let_next(EARLY: tl.constexpr):
    """Let the next launch begin as soon as every program of this one has come here."""
    if EARLY:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Zero, once the launches ahead have ended; to be added to pointers at what they wrote."""
    if EARLY:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        return tl.multiple_of(zero, 16)
    else:
        return 0


@triton.jit
def wait_in_loop(x, step):
    """x twice, as ``wait_for_previous`` of an early launch gives it: for wide reads, and for reads of single numbers.

    It is for pipelined loops: weights' copies begun before stay ahead of it. ``step``, the loop's variable, keeps it in
    the loop; said to be pure, it may be repeated or moved with what depends on it. A pipeline begins no read of single
    numbers early, which would bring the wait forward.
    """
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [step], dtype=tl.int32, is_pure=True, pack=1
    )
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=tl.int32, is_pure=True, pack=1)
    return x + tl.multiple_of(same, 16), x + zero
