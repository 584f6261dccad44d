"""The lightning indexer on this GPU: checks the kernels, then times them; DeepGEMM and vLLM's top-k where they import.

    python scripts/bench_indexer.py [--quick] [--json FILE]
    python scripts/bench_indexer.py --sweep [--json FILE]

Times are microseconds a call in CUDA-graph replays of several calls over rotating inputs. Every figure is printed and
written as it is made; all goals stand in tables at the end. --sweep compares the ways of selecting
(`topk_config.VARIANTS`) with the reference and times those that are right, beside vLLM's; 16 processes compile first.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import topk_sweep
from indexer_inputs import BLOCK, J, K, cache_of, check, cuda, queries, value_type
from indexer_table import LIKE, verdicts
from vllm_topk import FAILURES, compare, decode_choice, reason, vllm_ops

from glm5deploy.kernels import indexer
from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.prepare import prepare
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.topk_config import VARIANTS
from glm5deploy.kernels.tuning import gpu
from glm5deploy.kernels.warmup import Serving, launches

COPY_BYTES_PER_US = 4.3e6
BATCHES, CONTEXTS, QUERIES = (1, 8, 64), (8192, 32768, 131072), 2048
INPUT_SETS = 4


def deep_gemm() -> Any:
    """vLLM's DeepGEMM entry points, or None."""
    try:
        from vllm.utils import deep_gemm as module

        module.get_paged_mqa_logits_metadata(torch.ones(1, 1, dtype=torch.int32, device="cuda"), BLOCK, 132)
    except FAILURES as error:
        print(f"DeepGEMM is not here: {reason(error)}")
        return None
    return module


Figures = dict[str, float | str]
Calls = Callable[[], list[Callable[[], object]]]


def add_times(figures: Figures, choices: dict[str, Calls], repeats: int, per_graph: int) -> None:
    """Time each choice; one that fails says so instead of a time."""
    for name, make in choices.items():
        try:
            figures[name] = graph_time(make(), repeats=repeats, per_graph=per_graph)
        except FAILURES as error:
            figures[name] = reason(error)


def time_decode(batch: int, context: int, dg: Any, ops: Any, repeats: int) -> Figures:
    blocks = max(batch * context // BLOCK, 8192)
    cache = cache_of(blocks)
    tables = [torch.randperm(blocks, device="cuda")[: batch * context // BLOCK].view(batch, -1).int() for _ in range(4)]
    q, weights = queries(batch), torch.randn(batch, J, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    logits = torch.empty(batch, context, device="cuda")
    scores = [torch.randn(batch, context, device="cuda") for _ in range(INPUT_SETS)]
    alike = [topk_sweep.score_like(batch, context) for _ in range(INPUT_SETS)]
    out = torch.empty(batch, K, dtype=torch.int32, device="cuda")
    scratch = torch.empty(max(1, topk_workspace_elements(batch, context, K)), dtype=torch.int32, device="cuda")

    def deep() -> list[Callable[[], object]]:
        size = lengths[:, None].contiguous()
        plan = dg.get_paged_mqa_logits_metadata(size, BLOCK, gpu(cuda(0)).multiprocessors)
        run = partial(dg.fp8_fp4_paged_mqa_logits, (q[:, None], None), cache[:, :, None], weights, size)
        return [partial(run, t, plan, max_model_len=context) for t in tables]

    def mine(rows: list[torch.Tensor]) -> list[Callable[[], object]]:
        return [partial(select_topk, s, lengths, K, context, out, scratch) for s in rows]

    def theirs(name: str, rows: list[torch.Tensor]) -> list[Callable[[], object]]:
        return [partial(decode_choice(name), s, lengths, out, context) for s in rows]

    choices: dict[str, Calls] = {
        "ours": lambda: [partial(indexer.paged_logits, q, cache, weights, lengths, t, logits) for t in tables]
    }
    choices |= {"DeepGEMM": deep} if dg is not None else {}
    for name, rows in (("", scores), (LIKE, alike)):
        choices["topk" + name] = partial(mine, rows)
        if ops is not None:
            choices |= {of + name: partial(theirs, of, rows) for of in ("cooperative_topk", "persistent_topk")}
    figures: Figures = {"B": batch, "context": context, "floor": batch * context * 132 / COPY_BYTES_PER_US}
    add_times(figures, choices, repeats, 8)
    return figures


def time_prefill(context: int, dg: Any, ops: Any, repeats: int) -> Figures:
    q, weights = queries(QUERIES), torch.randn(QUERIES, J, device="cuda")
    k = torch.randn(context, 128, device="cuda").to(torch.float8_e4m3fn).to(value_type())
    scales = torch.rand(context, device="cuda")
    starts = torch.zeros(QUERIES, dtype=torch.int32, device="cuda")
    ends = torch.arange(QUERIES, dtype=torch.int32, device="cuda") + (context - QUERIES + 1)
    logits = torch.empty(QUERIES, context, device="cuda")
    with_scales = scales if value_type() == torch.float8_e4m3fn else None
    out = torch.empty(QUERIES, K, dtype=torch.int32, device="cuda")
    scratch = torch.empty(max(1, topk_workspace_elements(QUERIES, context, K)), dtype=torch.int32, device="cuda")
    rest = (QUERIES, logits.stride(0), logits.stride(1), K)
    choices: dict[str, Calls] = {
        "ours": lambda: [partial(indexer.ragged_logits, q, k, with_scales, weights, starts, ends, logits)]
    }
    if dg is not None:
        choices["DeepGEMM"] = lambda: [
            partial(dg.fp8_fp4_mqa_logits, (q, None), (k, scales), weights, starts, ends, context)
        ]

    def mine(rows: torch.Tensor) -> list[Callable[[], object]]:
        return [partial(select_topk, rows, ends, K, context, out, scratch)]

    def theirs(rows: torch.Tensor) -> list[Callable[[], object]]:
        return [partial(ops.top_k_per_row_prefill, rows, starts, ends, out, *rest)]

    for name, rows in (("", logits), (LIKE, topk_sweep.score_like(QUERIES, context))):
        choices["topk" + name] = partial(mine, rows)
        choices |= {"top_k_per_row" + name: partial(theirs, rows)} if ops is not None else {}
    choices["torch.topk"] = lambda: [partial(torch.topk, logits, K, sorted=False)]
    figures: Figures = {"T": QUERIES, "context": context}
    add_times(figures, choices, repeats, 2)
    if isinstance(ours := figures["ours"], float):
        figures["TFLOPs"] = QUERIES * context * J * 256 / ours / 1e6
    return figures


def compile_ours() -> None:
    """What is timed, side by side: one after the other takes longer than all that is measured."""
    serving = Serving(8, J, K, QUERIES, max(CONTEXTS), BLOCK, packed=False)
    kinds = ("prefill scores", "decode scores", "selection")
    began = time.monotonic()
    prepare([launch for launch in launches(serving, cuda(0)) if launch.variant[0] in kinds], cuda(0))
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)


def measured(quick: bool) -> Iterator[Figures]:
    repeats = 5 if quick else 20
    dg, ops = deep_gemm(), vllm_ops()
    print(f"{torch.cuda.get_device_name()}, microseconds; goals: decode 1.3 and prefill 2 x DeepGEMM, top-k 1 x vLLM's")
    for batch in BATCHES:
        for context in CONTEXTS:
            yield time_decode(batch, context, dg, ops, repeats)
    for context in CONTEXTS:
        yield time_prefill(context, dg, ops, max(3, repeats // 4))
    if ops is not None:
        compare(ops, K)


def failed(figures: dict[str, Any]) -> bool:
    """Whether one of ours is wrong or did not run."""
    return (
        any(isinstance(figures.get(name), str) for name in ("ours", "topk", "topk" + LIKE))
        or "WRONG rows" in figures
        or ("failed" in figures and figures["name"] in VARIANTS)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--sweep", action="store_true", help="compare and time the ways of selecting instead")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--compile-share", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.compile_share:
        topk_sweep.compile_share(*arguments.compile_share)
        return 0
    if arguments.sweep:
        topk_sweep.compile_all(__file__)
    torch.manual_seed(0)
    if not arguments.sweep:
        compile_ours()
        if not check():
            print("above the limits: not timed")
            return 1
    results: list[dict[str, Any]] = []
    for figures in topk_sweep.sweep() if arguments.sweep else measured(arguments.quick):
        results.append(figures)
        words = (f"{name} {v:.1f}" if isinstance(v, float) else f"{name} {v}" for name, v in figures.items())
        print("  ".join(words), flush=True)
        if arguments.json:  # each time, for a run may be cut off
            arguments.json.write_text(json.dumps(results, indent=1))
    if not arguments.sweep:
        print("\n".join(verdicts(results)))
    return int(any(map(failed, results)))


if __name__ == "__main__":
    sys.exit(main())
