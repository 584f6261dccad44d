"""Measures launch parameters on the GPU at hand and writes them as a table.

    python -m glm5deploy.kernels.tune --heads 8 --out TABLE.json [--topk 2048] [--packed] [--seconds 300]

A process that finds TABLE.json named in GLM5DEPLOY_KERNEL_TABLE then uses it. Prints a JSON object a line: ``done``,
``total`` and ``note`` while it measures, ``error`` and ``hint`` when it cannot, at last ``table`` and what is in it.

Measured pieces are kept beside the table until all are there, so that an interrupted run goes on where it was, and a
run that finds its table whole does nothing. A configuration that gives wrong results, does not fit the GPU's shared
memory or spills more than the built-in table allows is never written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from glm5deploy.errors import DeployError, UsageError
from glm5deploy.kernels import tune_cases as cases
from glm5deploy.kernels.measure import graph_time, wall_time
from glm5deploy.kernels.table_file import Measured, load_table, made_for, save_table
from glm5deploy.kernels.tune_run import Measuring, Say
from glm5deploy.kernels.tuning import (
    FIRST_FP8_ARCH,
    SPARSE_TABLE,
    SPILL_LIMIT,
    TABLE_VARIABLE,
    Gpu,
    LogitsConfig,
    SparseConfig,
    SparseRow,
    gpu,
    paged_config,
    ragged_config,
    sparse_config,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What the table is for: one GPU's attention heads, selected positions, cache type and index heads."""

    heads: int
    topk: int
    packed: bool
    index_heads: int

    def as_json(self) -> dict[str, Any]:
        return {"heads": self.heads, "topk": self.topk, "packed": self.packed, "index_heads": self.index_heads}


def tune(request: Request, path: Path, device: torch.device, seconds: float, say: Say) -> Measured:
    """Measure what the table at ``path`` lacks of ``request``, write it, and return it; at most about ``seconds``."""
    of, sizes = gpu(device), cases.Sizes() if device.type == "cuda" else cases.SMALL
    progress = path.with_name(path.name + ".progress")
    held = max(_held(path, request, of), _held(progress, request, of), key=_pieces_of)
    if held.complete:
        return held
    run = Measuring(device, time.monotonic() + seconds, say, graph_time if device.type == "cuda" else wall_time)
    run.total = len(sizes.tokens) + 2
    run.done = _pieces_of(held)
    held = replace(held, request=request.as_json())
    for longer in _pieces(run, request, held, sizes):
        held = longer
        save_table(progress, of, held)
    complete = run.done == run.total
    if held.rows or held.ragged or held.paged:
        save_table(path, of, replace(held, complete=complete))
    if complete:
        progress.unlink(missing_ok=True)
    return replace(held, complete=complete)


def _pieces_of(table: Measured) -> int:
    return len(table.rows) + (table.ragged is not None) + (table.paged is not None)


def _held(path: Path, request: Request, of: Gpu) -> Measured:
    """What a file has of the request; nothing where it is of something else."""
    try:
        found = load_table(path, of)
    except ValueError:
        return Measured()
    return found if not found.refused and found.request == request.as_json() else Measured()


def _pieces(run: Measuring, request: Request, held: Measured, sizes: cases.Sizes) -> Iterator[Measured]:
    """The table after each piece; ends early when the time is up."""
    of, device = gpu(run.device), run.device
    limits = {replace(row.config, per_sm=1): row.spill_limit for row in SPARSE_TABLE}
    if len(held.rows) < len(sizes.tokens):
        rows = cases.cache_rows(request.packed, device, sizes)
        small = cases.Attention(rows, request.heads, request.topk, 2, sizes)
        first = sparse_config(of, request.packed, request.heads, 1)
        run.compile(small, cases.attention_candidates(request.heads, first), limits)
    for tokens, most in sizes.tokens[len(held.rows) :]:
        if run.over:
            return
        case = cases.Attention(rows, request.heads, request.topk, tokens, sizes)
        built_in = sparse_config(of, request.packed, request.heads, tokens)
        candidates = cases.attention_candidates(request.heads, built_in)[: sizes.candidates]
        config: SparseConfig | None = run.best(f"attention, {tokens} tokens", case, candidates)
        if config is None:
            return
        limit = limits.get(replace(config, per_sm=1), SPILL_LIMIT)
        row = SparseRow((of.family,), request.packed, request.heads, most, config, limit)
        held = replace(held, rows=(*held.rows, row))
        yield held
    fp8 = of.arch >= FIRST_FP8_ARCH
    for name, ragged in (("ragged", True), ("paged", False)):
        if getattr(held, name) is not None:
            continue
        if run.over:
            return
        chosen = (ragged_config if ragged else paged_config)(of, fp8)
        scores = cases.Scores(ragged, request.index_heads, device, sizes)
        rivals = cases.logits_candidates(chosen, ragged)[: sizes.candidates]
        run.compile(scores, rivals, {})
        best: LogitsConfig | None = run.best(f"{'prefill' if ragged else 'decode'} scores", scores, rivals)
        if best is None:
            return
        held = replace(held, ragged=best) if ragged else replace(held, paged=best)
        yield held


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m glm5deploy.kernels.tune", description=__doc__)
    parser.add_argument("--heads", type=int, required=True, help="attention heads of one GPU")
    parser.add_argument("--topk", type=int, default=2048, help="selected positions")
    parser.add_argument("--packed", action="store_true", help="the cache is fp8_ds_mla")
    parser.add_argument("--index-heads", type=int, default=32, help="heads of the indexer")
    parser.add_argument("--seconds", type=float, default=300.0, help="what is not measured by then stays built-in")
    parser.add_argument("--out", type=Path, required=True, help="table to write")
    chosen = parser.parse_args()

    def say(facts: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()

    os.environ.pop(TABLE_VARIABLE, None)  # rivals are compared with the built-in table
    try:
        device = _device()
        request = Request(chosen.heads, chosen.topk, chosen.packed, chosen.index_heads)
        table = tune(request, chosen.out, device, chosen.seconds, say)
    except DeployError as error:
        say({"error": error.message, "hint": error.hint})
        return error.exit_code
    say(
        {
            "table": str(chosen.out),
            "made_for": made_for(gpu(device)),
            "rows": len(table.rows),
            "complete": table.complete,
            "request": dict(table.request),
        }
    )
    return 0


def _device() -> torch.device:
    """The first GPU; a CPU under Triton's interpreter alone, where the same way is gone over a few small inputs."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    raise UsageError(
        "launch parameters are measured on a CUDA GPU, and torch finds none here",
        hint="leave --tune out; without measured ones the built-in table is used",
    )


if __name__ == "__main__":
    sys.exit(main())
