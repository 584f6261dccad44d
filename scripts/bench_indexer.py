"""The lightning indexer on this GPU: checks the kernels, then times them; DeepGEMM and vLLM's top-k where they import.

    python scripts/bench_indexer.py [--quick] [--json FILE]

Times are microseconds a call in CUDA-graph replays of several calls over rotating inputs.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from vllm_topk import compare, decode_choice, vllm_ops

from glm5deploy.kernels import indexer, reference
from glm5deploy.kernels.measure import graph_time, relative_rms
from glm5deploy.kernels.topk import select_topk, topk_workspace_elements
from glm5deploy.kernels.tuning import FIRST_FP8_ARCH, gpu

J, K, BLOCK = 32, 2048, 64
COPY_BYTES_PER_US = 4.3e6
BATCHES, CONTEXTS, QUERIES = (1, 8, 64), (8192, 32768, 131072), 2048
INPUT_SETS = 4
cuda = partial(torch.device, "cuda")


def value_type() -> torch.dtype:
    return torch.float8_e4m3fn if gpu(cuda(0)).arch >= FIRST_FP8_ARCH else torch.bfloat16


def queries(rows: int) -> torch.Tensor:
    return torch.randn(rows, J, 128, device="cuda").to(torch.float8_e4m3fn).to(value_type())


def cache_of(blocks: int) -> torch.Tensor:
    cache = torch.randint(0, 120, (blocks, BLOCK, 132), dtype=torch.uint8, device="cuda")
    reference.index_cache_views(cache)[1].fill_(0.5)
    return cache


def check() -> bool:
    """Logits and selections against the reference, on real sizes."""
    worst = 0.0
    k = torch.randn(5000, 128, device="cuda").to(torch.float8_e4m3fn)
    scales, q, weights = torch.rand(5000, device="cuda"), queries(70), torch.randn(70, J, device="cuda")
    starts = torch.zeros(70, dtype=torch.int32, device="cuda")
    starts[40:] = 1003
    ends = torch.arange(70, dtype=torch.int32, device="cuda") + 4930
    logits = torch.zeros(70, 5000, device="cuda")
    fp8 = value_type() == torch.float8_e4m3fn
    keys = k if fp8 else (k.float() * scales[:, None]).to(value_type())
    indexer.ragged_logits(q, keys, scales if fp8 else None, weights, starts, ends, logits)
    exact = reference.indexer_logits(q, k.float() * scales[:, None], weights)
    for t in range(70):
        part = slice(int(starts[t]), int(ends[t]))
        worst = max(worst, relative_rms(logits[t, : part.stop - part.start], exact[t, part]))
    cache, table = cache_of(100), torch.randperm(100, device="cuda").int().view(2, 50)
    lengths = torch.tensor([3200, 1, 63, 64, 65, 2049], dtype=torch.int32, device="cuda")
    rows = torch.zeros(6, 3200, device="cuda")
    indexer.paged_logits(q[:6], cache, weights[:6], lengths, table, rows)
    for t in range(6):
        position = torch.arange(int(lengths[t]), device="cuda")
        slots = table[t // 3, position // BLOCK].long() * BLOCK + position % BLOCK
        exact = reference.indexer_logits(q[t : t + 1], reference.load_index_keys(cache, slots), weights[t : t + 1])
        worst = max(worst, relative_rms(rows[t, : lengths[t]], exact[0]))
    same = True
    scores = torch.randn(6, 140_000, device="cuda")
    scores[1] = scores[1].round()
    sizes = torch.tensor([140_000, 140_000, 0, 2047, 2049, 70_000], dtype=torch.int32, device="cuda")
    for k_best in (K, 64, 4096):
        workspace = torch.empty(topk_workspace_elements(6, 140_000, k_best), dtype=torch.int32, device="cuda")
        out = torch.full((6, k_best), 7, dtype=torch.int32, device="cuda")
        select_topk(scores, sizes, k_best, 140_000, out, workspace)
        same &= torch.equal(out, reference.select_topk(scores, sizes, k_best))
    print(f"logits: worst relative RMS error {worst:.1e} (limit 2e-3); top-k equal to the reference: {same}")
    return worst <= 2e-3 and same


def deep_gemm() -> Any:
    """vLLM's DeepGEMM entry points, or None."""
    try:
        from vllm.utils import deep_gemm as module

        module.get_paged_mqa_logits_metadata(torch.ones(1, 1, dtype=torch.int32, device="cuda"), BLOCK, 132)
    except (ImportError, AttributeError, RuntimeError) as error:
        print(f"DeepGEMM is not here: {str(error).splitlines()[0][:100]}")
        return None
    return module


def time_decode(batch: int, context: int, dg: Any, ops: Any, repeats: int) -> dict[str, float]:
    blocks = max(batch * context // BLOCK, 8192)
    cache = cache_of(blocks)
    tables = [torch.randperm(blocks, device="cuda")[: batch * context // BLOCK].view(batch, -1).int() for _ in range(4)]
    q, weights = queries(batch), torch.randn(batch, J, device="cuda")
    lengths = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    logits = torch.empty(batch, context, device="cuda")
    time = partial(graph_time, repeats=repeats, per_graph=8)
    result = {"B": batch, "context": context, "floor": batch * context * 132 / COPY_BYTES_PER_US}
    result["ours"] = time([partial(indexer.paged_logits, q, cache, weights, lengths, t, logits) for t in tables])
    if dg is not None:
        size = lengths[:, None].contiguous()
        plan = dg.get_paged_mqa_logits_metadata(size, BLOCK, gpu(cuda(0)).multiprocessors)
        run = partial(dg.fp8_fp4_paged_mqa_logits, (q[:, None], None), cache[:, :, None], weights, size)
        result["DeepGEMM"] = time([partial(run, t, plan, max_model_len=context) for t in tables])
    scores = [torch.randn(batch, context, device="cuda") for _ in range(INPUT_SETS)]
    out = torch.empty(batch, K, dtype=torch.int32, device="cuda")
    scratch = torch.empty(max(1, topk_workspace_elements(batch, context, K)), dtype=torch.int32, device="cuda")
    result["topk"] = time([partial(select_topk, s, lengths, K, context, out, scratch) for s in scores])
    if ops is not None:
        for name in ("cooperative_topk", "persistent_topk"):
            choose = decode_choice(name)
            result[name] = time([partial(choose, s, lengths, out, context) for s in scores])
    return result


def time_prefill(context: int, dg: Any, ops: Any, repeats: int) -> dict[str, float]:
    q, weights = queries(QUERIES), torch.randn(QUERIES, J, device="cuda")
    k = torch.randn(context, 128, device="cuda").to(torch.float8_e4m3fn).to(value_type())
    scales = torch.rand(context, device="cuda")
    starts = torch.zeros(QUERIES, dtype=torch.int32, device="cuda")
    ends = torch.arange(QUERIES, dtype=torch.int32, device="cuda") + (context - QUERIES + 1)
    logits = torch.empty(QUERIES, context, device="cuda")
    with_scales = scales if value_type() == torch.float8_e4m3fn else None
    time = partial(graph_time, repeats=repeats, per_graph=2)
    result: dict[str, float] = {"T": QUERIES, "context": context}
    result["ours"] = time([partial(indexer.ragged_logits, q, k, with_scales, weights, starts, ends, logits)])
    result["TFLOPs"] = QUERIES * context * J * 256 / result["ours"] / 1e6
    if dg is not None:
        result["DeepGEMM"] = time(
            [partial(dg.fp8_fp4_mqa_logits, (q, None), (k, scales), weights, starts, ends, context)]
        )
    out = torch.empty(QUERIES, K, dtype=torch.int32, device="cuda")
    scratch = torch.empty(max(1, topk_workspace_elements(QUERIES, context, K)), dtype=torch.int32, device="cuda")
    result["topk"] = time([partial(select_topk, logits, ends, K, context, out, scratch)])
    if ops is not None:
        rest = (QUERIES, logits.stride(0), logits.stride(1), K)
        result["top_k_per_row"] = time([partial(ops.top_k_per_row_prefill, logits, starts, ends, out, *rest)])
    result["torch.topk"] = time([partial(torch.topk, logits, K, sorted=False)])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if not check():
        print("above the limits: not timed")
        return 1
    dg, ops, repeats = deep_gemm(), vllm_ops(), 5 if arguments.quick else 20
    results = [time_decode(b, s, dg, ops, repeats) for b in BATCHES for s in CONTEXTS]
    results += [time_prefill(s, dg, ops, max(3, repeats // 4)) for s in CONTEXTS]
    print(f"{torch.cuda.get_device_name()}, microseconds; goals: decode 1.3 and prefill 2 x DeepGEMM, top-k 1 x vLLM's")
    for r in results:
        print(
            "  ".join(
                f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in r.items()
            )
        )
    if ops is not None:
        compare(ops, K)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
