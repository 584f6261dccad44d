"""Runs the selection kernels as they are compiled for a GPU, without one, and compares with the reference.

`python -m tests.kernels.topk_programs` prints one JSON object a line: kernel, case, rows that are wrong, rows whose
lists were searched. It runs apart from the tests' process, which has Triton's interpreter switched on: Gluon and stores
in assembly are not for that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from glm5deploy.kernels import reference
from tests.kernels.ptx_program import Program
from tests.kernels.topk_rows import POISON, awkward_rows, close_rows, deceiving_rows
from tests.support.compiling import kernel_source

ARCH = 90
PARTS = 4
POINTERS = {"logits": "*fp32", "starts": "*i32", "lengths": "*i32", "topk": "*i32"}
POINTERS |= {"counts": "*i64", "lists": "*i64", "held_pairs": "*i64"}


@dataclass(frozen=True)
class Built:
    """A compiled kernel, the columns that it holds, and the kernel before it where rows have parts."""

    name: str
    program: Program
    columns: int
    first: Program | None = None
    early: bool | None = None  # where it is told of columns: all of them, or none

    def run(self, row: int, numbers: list[Any], out: Any, k: int, strides: list[int]) -> bool:
        """Select from a row; `numbers` are logits, starts and lengths. Whether lists of parts were searched for it."""
        if self.first is None:
            columns = [] if self.early is None else [strides[0] * self.early]
            self.program.run((row,), [*numbers, out, k, *strides, *columns])
            return False
        entries = self.columns // PARTS
        rows = row + 1
        counts, lists, held = (np.full(2 * rows * n, POISON, np.int32) for n in (PARTS, PARTS * entries, entries))
        for part in range(PARTS):
            self.first.run((row, part), [*numbers, counts, lists, k, 1, strides[0]], (rows, PARTS))
        self.program.run((row,), [*numbers, counts, lists, held, out, k, PARTS, *strides])
        return bool((held != POISON).any())


def build(kernel: Any, constants: dict[str, Any], warps: int, columns: int) -> Built:
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = [n for n in ("logits", "lists", "held_pairs") if n in kernel.arg_names]
    source = kernel_source(kernel, POINTERS, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options={"num_warps": warps})
    return Built(kernel.__name__, Program(compiled.asm["ptx"], 32 * warps, compiled.metadata.shared), columns)


def kernels() -> Iterator[tuple[Built, bool]]:
    """Small programs of every form, and whether their rows may start anywhere."""
    from glm5deploy.kernels.topk_block import topk_block_kernel
    from glm5deploy.kernels.topk_steps import topk_steps_kernel
    from glm5deploy.kernels.topk_stream import topk_parts_kernel, topk_stream_kernel

    for warps, groups, bins, starts in ((2, 4, 7, False), (1, 8, 5, True), (1, 6, 7, False)):
        constants = {"HAS_STARTS": starts, "WARPS": warps, "GROUPS": groups, "LOG_BINS": bins, "SPARING": groups > 6}
        built = build(topk_steps_kernel, constants, warps, 128 * warps * groups)
        yield replace(built, early=not starts), starts
    yield build(topk_block_kernel, {"HAS_STARTS": True, "WARPS": 2, "ASM": True}, 2, 1024), True
    same = {"HAS_STARTS": True, "WARPS": 2, "SAMPLE": 256, "ASM": True, "EARLY": True}
    first = build(topk_parts_kernel, same, 2, 1024)
    second = build(topk_stream_kernel, same | {"PARTS": PARTS, "LIST": 1024}, 2, PARTS * 1024)
    yield replace(second, first=first.program), True


def run_rows(built: Built, logits: torch.Tensor, lengths: list[int], k: int, starts: list[int]) -> dict[str, list[int]]:
    """Rows that are wrong, differing from the reference or written to behind the k columns; with searched lists."""
    rows, columns = logits.shape
    padded = np.full(-(-rows * columns // 4) * 4, np.nan, np.float32)
    padded[: rows * columns] = logits.reshape(-1).numpy()
    sizes, first = np.array(lengths, np.int32), np.array(starts, np.int32)
    expected = reference.select_topk(logits, torch.from_numpy(sizes), k, torch.from_numpy(first)).numpy()
    out = np.full((rows, k + 3), -77, np.int32)
    searched = [row for row in range(rows) if built.run(row, [padded, first, sizes], out, k, [columns, k + 3])]
    wrong = [r for r in range(rows) if (out[r, :k] != expected[r]).any() or (out[r, k:] != -77).any()]
    return {"wrong": wrong, "searched": searched}


def main() -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    torch.manual_seed(7)
    for number, (built, has_starts) in enumerate(kernels()):
        most = built.columns - 3
        rows = torch.cat((awkward_rows(most), deceiving_rows(most)))
        zeros = [0] * len(rows)
        cases = [
            (f"k {k}", rows, [most - i % 4 for i in range(len(rows))], k, zeros)
            for k in ((1, 130, 700) if number == 0 else (130,))
        ]
        around = [0, 1, 127, 128, 129, 130, 131, 132, 255, most]
        cases.append(("close", close_rows(most, 130), [most] * 6, 130, [0] * 6))
        cases.append(("lengths", torch.randn(10, most), around, 129, [0] * 10))
        if has_starts:
            moved = torch.randn(5, most + 100)
            cases.append(("starts", moved, [most, 0, 100, 509, 700], 100, [100, most + 100, 1, 2, 3]))
        for name, logits, lengths, k, starts in cases:
            found = run_rows(built, logits, lengths, k, starts)
            sys.stdout.write(json.dumps({"kernel": built.name, "case": name, **found}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
