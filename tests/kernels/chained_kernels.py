"""Kernels that keep the order of chained launches, and that break it: what `chain_order` finds in each, as JSON.

``python -m tests.kernels.chained_kernels`` compiles them for an H200, which the tests' process, an interpreter, cannot.
"""

from __future__ import annotations

import json
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from glm5deploy.kernels.chain import let_next_begin, wait_for_previous
from tests.support.chain_order import out_of_order
from tests.support.compiling import kernel_source

LANES = tl.constexpr(128)


@triton.jit
def in_order(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    b_w = tl.load(weight + o)
    wait_for_previous(CHAINED)
    let_next_begin(CHAINED)
    tl.store(out + o, tl.load(x + o) + b_w)


@triton.jit
def never_waits(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    tl.store(out + o, tl.load(weight + o))


@triton.jit
def stores(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    tl.store(out + o, tl.load(weight + o))
    wait_for_previous(CHAINED)
    tl.store(out + o, tl.load(x + o))


@triton.jit
def counts(x, weight, out, n, CHAINED: tl.constexpr):
    tl.atomic_add(out, 1.0)
    wait_for_previous(CHAINED)
    tl.store(out + 1, tl.load(x))


@triton.jit
def lets_next_begin(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    let_next_begin(CHAINED)
    wait_for_previous(CHAINED)
    tl.store(out + o, tl.load(x + o))


@triton.jit
def reads(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    b_x = tl.load(x + o)
    wait_for_previous(CHAINED)
    tl.store(out + o, b_x + tl.load(weight + o))


@triton.jit
def reads_either(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    b_any = tl.load(tl.where(tl.program_id(0) == n, x, weight) + o)
    wait_for_previous(CHAINED)
    tl.store(out + o, b_any)


@triton.jit
def waits_in_one_branch(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    if tl.program_id(0) < n:
        wait_for_previous(CHAINED)
        tl.store(out + LANES + o, tl.load(x + o))
    tl.store(out + o, tl.load(weight + o))


@triton.jit
def waits_in_a_loop(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    for i in range(n):
        tl.store(out + i * LANES + o, tl.load(weight + o))
        wait_for_previous(CHAINED)


@triton.jit
def ends_early(x, weight, out, n, CHAINED: tl.constexpr):
    o = tl.arange(0, LANES)
    if tl.program_id(0) == n:
        tl.store(out + o, tl.load(weight + o))
        return
    wait_for_previous(CHAINED)
    tl.store(out + o, tl.load(x + o))


@triton.jit(noinline=True)
def _copy(x, out):
    o = tl.arange(0, LANES)
    tl.store(out + o, tl.load(x + o))


@triton.jit
def calls(x, weight, out, n, CHAINED: tl.constexpr):
    _copy(x, out)
    wait_for_previous(CHAINED)
    tl.store(out, tl.load(weight))


KERNELS = (
    in_order,
    never_waits,
    stores,
    counts,
    lets_next_begin,
    reads,
    reads_either,
    waits_in_one_branch,
    waits_in_a_loop,
    ends_early,
    calls,
)


def main() -> None:
    found = {}
    for kernel in KERNELS:
        types = dict.fromkeys(("x", "weight", "out"), "*fp32")
        source = kernel_source(kernel, types, {"CHAINED": True}, tuple(types))
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        found[kernel.__name__] = out_of_order(made.asm["ptx"], source.signature)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
