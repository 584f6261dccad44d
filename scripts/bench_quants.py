"""Times products with GGML planes against bf16 cuBLAS, vllm-gguf-plugin and the bytes they must read, on a GPU.

    python scripts/bench_quants.py [--out results.json] [--sweep [decode]] [--jobs 14]
    python scripts/bench_quants.py --compile    fill Triton's cache and leave it at that; --compiled then starts at once

Errors first, times after: a product that is not right is not timed. Each figure is the median of replays of a CUDA
graph of several calls on different inputs and weights, so caches are cold. Shapes are GLM-5's on one of eight ranks.
``--sweep`` also tries other launches than the table's; ``--sweep decode`` does that alone, for a decoded token.
The plugin's columns say "absent" where it (or vLLM, which it needs) is not installed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quant_speed import cases, peers, sweep
from quant_speed.decode_sweep import decode_sweep
from quant_speed.report import LIMIT, RATE, Row, as_json, head, line
from triton.errors import TritonError

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants import products, routed_experts

Calls = list[Callable[[], torch.Tensor]]


def timed(calls: Calls) -> float:
    return graph_time(calls, 10, len(calls))


def timed_peer(calls: Calls, expected: torch.Tensor) -> tuple[float | None, float | None]:
    """Time and error of a peer; one that does not run, or fits another vLLM than the one here, is said and left out."""
    try:
        return timed(calls), cases.error(calls[0](), expected)
    except (RuntimeError, TypeError, AttributeError, ValueError, ImportError, TritonError) as problem:
        print(f"the plugin failed: {str(problem)[:200]}")
        return None, None


def linear_rows(name: str, n: int, k: int, plugin: peers.Plugin | None) -> list[Row]:
    weights = [cases.weights(name, n, k) for _ in range(cases.copies(name, n, k))]
    dense = [w.dense()[0].to(torch.bfloat16) for w in weights[: max(2, len(weights) // 4)]]
    exact = weights[0].dense()[0].T
    rows = []
    for m in sorted({*cases.LINEAR_TOKENS, *cases.CHECKED_TOKENS}):
        xs = [cases.activations(m, k) for _ in weights]
        expected = xs[0].float() @ exact
        row = Row(f"{n}x{k} {name}", m, cases.error(products.linear(xs[0], weights[0].planes), expected))
        rows.append(row)
        if m not in cases.LINEAR_TOKENS or not row.error <= LIMIT:
            continue
        row.floor = weights[0].planes.nbytes / RATE * 1e6
        row.ours = timed([lambda x=x, w=w: products.linear(x, w.planes) for x, w in zip(xs, weights, strict=True)])
        row.cublas = timed([lambda x=x, w=w: x @ w.T for x, w in zip(xs, dense, strict=False)])
        if plugin is not None and m <= 64:
            kernels = [plugin.linear(x, w) for x, w in zip(xs, weights, strict=True)]
            found = [timed_peer([k[which] for k in kernels], expected) for which in kernels[0]]
            row.plugin, row.plugin_error = min(found, key=lambda f: f[0] or float("inf"))
    return rows


def moe_rows(names: tuple[str, str, str], plugin: peers.Plugin | None, swept: bool) -> list[Row]:
    weights = cases.expert_weights(names)
    planes = [w.planes for w in weights]
    gate, up, down = (w.dense() for w in weights)
    merged = torch.cat((weights[0].rows, weights[1].rows), 1) if plugin is not None else weights[0].rows
    rows = []
    for tokens in sorted({*cases.MOE_TOKENS, *cases.CHECKED_TOKENS}):
        calls = cases.routed(tokens, 3 if tokens > 256 else 10)
        expected = cases.moe_reference(calls[0], (gate, up, down))
        runs: Calls = [lambda r=r: routed_experts.moe(r.x, *planes, r.ids, r.share) for r in calls]
        row = Row(f"MoE {'/'.join(names)}", tokens, cases.error(runs[0](), expected))
        rows.append(row)
        if tokens not in cases.MOE_TOKENS or not row.error <= LIMIT:
            continue
        expert_bytes = sum(p.nbytes for p in planes) / cases.EXPERTS
        row.floor = cases.mean_active(calls) * expert_bytes / RATE * 1e6
        row.ours = timed(runs)
        if plugin is not None:
            theirs = [plugin.moe(r, merged, weights[2], names[0]) for r in calls]
            row.plugin, row.plugin_error = timed_peer(theirs, expected)
        if swept:
            print("\n".join(sweep.sweep_moe(weights, tokens)), flush=True)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument(
        "--sweep", nargs="?", const="all", default="", choices=("all", "decode"), help="also try other launches"
    )
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--compile", action="store_true", help="only compile")
    parser.add_argument("--compiled", action="store_true", help="everything is compiled already")
    parser.add_argument("--compile-share", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.compile_share:
        sweep.compile_share(*args.compile_share, args.sweep)
        return 0
    began = time.monotonic()
    if not args.compiled:
        sweep.compile_all(__file__, args.jobs, args.sweep)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    if args.compile:
        return 0
    torch.manual_seed(0)
    if args.sweep == "decode":
        return decode_sweep(args.out)
    free, memory = torch.cuda.mem_get_info()
    print(f"{torch.cuda.get_device_name()}, {free / 1e9:.0f} of {memory / 1e9:.0f} GB free", flush=True)
    plugin = peers.plugin()
    types = cases.type_errors()
    print("worst error of a type:", "; ".join(f"{k} {e:.2e} at {case}" for k, (e, case) in types.items()))
    rows: list[Row] = []
    wrong = [f"{k} is wrong by {e:.2e} at {case}" for k, (e, case) in types.items() if not e <= LIMIT]

    def keep() -> None:
        """After every product, for a run may be cut off."""
        if args.out:
            figures = {"gpu": torch.cuda.get_device_name(), "types": types, "rows": as_json(rows), "wrong": wrong}
            args.out.write_text(json.dumps(figures, indent=1))

    keep()
    print(head(), flush=True)
    swept = [args.sweep and names == cases.MOE_TYPES[0] for names in cases.MOE_TYPES]
    jobs = [
        (f"MoE {names}", lambda n=names, s=sweeps: moe_rows(n, plugin, s))
        for names, sweeps in zip(cases.MOE_TYPES, swept, strict=True)
    ]
    jobs += [
        (f"{shape} {kind}", lambda t=kind, s=shape: linear_rows(t, *s, plugin))
        for kind in cases.LINEAR_TYPES
        for shape in cases.LINEAR_SHAPES
    ]
    for name, job in jobs:
        try:
            found = job()
        except (RuntimeError, TritonError) as problem:  # the others are still wanted
            wrong.append(f"{name} failed: {type(problem).__name__}: {str(problem)[:300]}")
            print(wrong[-1], flush=True)
        else:
            print("\n".join(line(row, plugin is not None) for row in found if row.ours is not None), flush=True)
            rows += found
            above = [row for row in found if not row.error <= LIMIT]
            wrong += [f"{row.what} is wrong by {row.error:.2e} at {row.tokens}" for row in above]
        keep()
    if args.sweep:
        for shape in cases.LINEAR_SHAPES:
            for tokens in (1, 16, 64):
                print("\n".join(sweep.sweep_linear("Q4_K", *shape, tokens)), flush=True)
        if decode_sweep(args.out and args.out.with_suffix(".decode.json")):
            wrong.append("a variant of a decoded token's products is wrong")
    worst = max((row.error for row in rows), default=float("nan"))
    print(f"worst error of {len(rows)} cases: {worst:.2e}; done in {time.monotonic() - began:.0f} s")
    print("missed:", "; ".join(f"{r.what} {r.tokens}: {', '.join(r.missed)}" for r in rows if r.missed) or "nothing")
    print("wrong:", "; ".join(wrong) or "nothing")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
