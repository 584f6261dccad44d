"""Runs the products with integers as they are compiled for a GPU, without one, and compares with fp64.

`python -m tests.quants.integer_programs` prints one JSON object a line: kernel, case, how far its numbers are off (see
`missed`), `stray` (numbers written where none belongs) and `unfinished` (tickets that are not zero again); then, for
kernels from which something is taken that they cannot do without, whether that was noticed. It runs apart from the
tests' process, which has Triton's interpreter switched on: Gluon is not for that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from glm5deploy.quants.launch import Launch
from tests.quants.integer_runs import Case, down, gate_up, linear

# Experts have no pair, one, a whole tile, and one more than that.
FEW, SOME, MANY = (0, 1, 8, 9), (0, 16, 1, 17), (0, 33, 32)
GATE_UP = (
    Case(("Q4_K", "Q4_K"), Launch(32, 8, warps=2, stages=2), 80, 3, FEW),
    Case(("Q5_K", "Q6_K"), Launch(64, 16, warps=4, stages=3), 80, 2, SOME),
    Case(("Q6_K", "Q4_K"), Launch(32, 32, warps=2, stages=3), 64, 1, MANY, 80),
    Case(("Q4_K", "Q5_K"), Launch(32, 8, parts=2, warps=2, stages=3), 48, 3, FEW, 120),
    Case(("Q2_K", "Q3_K"), Launch(64, 8, stages=2), 80, 2, FEW, 100),
    Case(("IQ2_XXS", "IQ2_S"), Launch(32, 8, warps=2, stages=2), 48, 2, FEW),
    Case(("Q5_K", "Q5_K"), Launch(64, 32, parts=2, stages=2), 64, 3, MANY),
)
DOWN = (
    Case(("Q4_K",), Launch(32, 8, tiles=2, warps=2, stages=3), 144, 1, FEW, terms="*fp32"),
    Case(("Q5_K",), Launch(64, 16, warps=4, stages=2), 144, 2, SOME, 120),
    Case(("Q6_K",), Launch(32, 32, tiles=3, warps=2, stages=3), 112, 3, MANY),
    Case(("Q3_K",), Launch(64, 8, tiles=2, stages=3), 208, 1, FEW, 89),
    Case(("IQ3_XXS",), Launch(32, 8, tiles=2, warps=2, stages=2), 80, 1, FEW),
)
LINEAR = (
    Case(("Q4_K",), Launch(32, 8, parts=2, warps=2, stages=3), 80, 3, (11,)),
    Case(("Q6_K",), Launch(64, 16, warps=2, stages=2), 64, 2, (16,)),
    Case(("Q5_K",), Launch(64, 64, parts=3, stages=2), 80, 3, (65,)),
    Case(("Q3_K",), Launch(32, 32, parts=2, warps=2, stages=2), 112, 2, (33,), 86),
    Case(("Q2_K",), Launch(32, 8, parts=8, warps=2, stages=2), 32, 9, (5,)),
    Case(("IQ4_XS",), Launch(32, 8, warps=2, stages=2), 48, 2, (3,)),
    Case(("IQ3_S",), Launch(32, 8, warps=2, stages=2), 32, 2, (3,)),
)
# What a kernel cannot do without: barriers, waiting for copies, and for as many groups of them.
CHANGES = (("bar.sync", "// "), ("cp.async.wait_group", "// "), ("cp.async.wait_group \t0", "cp.async.wait_group 1"))


def results() -> Iterator[dict[str, Any]]:
    for function, cases in ((gate_up, GATE_UP), (down, DOWN), (linear, LINEAR)):
        for case in cases:
            yield {"kernel": function.__name__, "case": str(case), **function(case)}
    for change in CHANGES:
        try:
            gate_up(replace(GATE_UP[0], n=32, counts=(0, 1)), change)
        except AssertionError as error:
            yield {"changed": change, "noticed": str(error)}


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    for found in results():
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
