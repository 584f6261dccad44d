"""Times products with GGML planes against bf16 cuBLAS and the bytes they must read, on the GPU at hand.

    python scripts/bench_quants.py [--out results.json] [--sweep] [--jobs 14]

Numbers first, times after: a product that is not right is not timed. Each figure is the median of replays of a CUDA
graph of several calls on different inputs and weights, so caches are cold; "one" is a graph of a single call, which
pays for the replay. Shapes are GLM-5's on one of eight ranks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from glm5deploy.quants import launch, products, reference
from glm5deploy.quants.formats import FORMATS, format_of
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes, empty_planes, repack

RATE = 4.3e12  # bytes a second that a large copy reaches on an H200
LIMIT = 4e-3  # relative error of a product, root mean square
LINEAR_SHAPES = ((2624, 6144), (2048, 2048), (6144, 2048), (19360, 6144))
LINEAR_TYPES = ("Q4_K", "Q6_K", "Q8_0")
LINEAR_TOKENS = (1, 4, 16, 64, 512, 2048)
MOE_TYPES = (("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q4_K", "Q6_K"))
MOE_TOKENS = (1, 4, 16, 64, 256, 2048)
# A minimum over the scale that puts zero in the middle of the codes
MINIMUM = {"Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5, "Q4_1": -7.5, "Q5_1": -15.5}
SWEPT = (1, 16, 64, 256, 2048)  # token counts for which --sweep tries other launches
EXPERTS, TOPK, HIDDEN, UNITS = 256, 8, 6144, 256


def random_planes(name: str, rows: int, columns: int, experts: int = 1) -> Planes:
    """Random codes and scale bits, fp16 scales around 0.01, made expert by expert on the GPU."""
    fmt = format_of(name)
    out = empty_planes(name, rows, columns, experts, "cuda")
    for e in range(experts):
        if fmt.dense:
            values = torch.randn((rows, columns), device="cuda") * 0.02
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
            out.slice(e, e + 1).copy_(repack(name, values.to(dtype).view(torch.uint8)))
            continue
        shape = (rows, columns // fmt.block_elements, fmt.block_bytes)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
        scale = (torch.rand(shape[:-1], device="cuda") + 1) * 0.01
        for k, at in enumerate(fmt.halves[:1] if name == "IQ4_XS" else fmt.halves):
            half = (scale * (MINIMUM[name] if k else 1)).to(torch.float16)
            blocks[..., at : at + 2] = half[..., None].view(torch.uint8)
        if name in ("Q4_K", "Q5_K"):  # a group's minimum byte near its scale byte, as weights around zero have it
            blocks[..., 8:12] = blocks[..., 4:8] ^ (blocks[..., 8:12] & 3)
            blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17 ^ (blocks[..., 12:16] & 0x30)
        if name == "Q2_K":
            blocks[..., :16] = (blocks[..., :16] & 15) * 17 ^ (blocks[..., :16] & 0x10)
        if name == "MXFP4":
            blocks[..., 0] = 120
        out.slice(e, e + 1).copy_(repack(name, blocks.reshape(rows, -1)))
    return out


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    found = float((ours.float() - theirs).norm() / theirs.norm())
    return found if torch.isfinite(ours).all() else float("inf")


def routing(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.rand((tokens, EXPERTS), device="cuda").topk(TOPK).indices.to(torch.int32)
    return ids, torch.rand((tokens, TOPK), device="cuda")


def replay_us(calls: list[Callable[[], object]], replays: int = 20) -> float:
    """Median microseconds of one of ``calls`` when a graph of all of them is replayed."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for k in range(replays + 3):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if k >= 3:
            times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return statistics.median(times)


def one_us(calls: list[Callable[[], object]], replays: int = 40) -> float:
    """Median microseconds of a graph of a single call, over graphs of different inputs."""
    graphs = []
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    times = []
    for k in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs[k % len(graphs)].replay()
        stop.record()
        stop.synchronize()
        if k >= len(graphs):
            times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def bench_linear(name: str, n: int, k: int, full: bool) -> list[dict[str, object]]:
    bytes_read = n * k * format_of(name).plane_bytes // 256
    copies = max(2, min(64, round(2.5e8 / bytes_read)))  # more than the L2 cache holds
    weights = [random_planes(name, n, k) for _ in range(copies)]
    dense = [reference.dequantize_planes(w)[0].to(torch.bfloat16) for w in weights[: max(2, copies // 4)]]
    rows: list[dict[str, object]] = []
    for m in LINEAR_TOKENS:
        xs = [torch.randn((m, k), device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        wrong = error(products.linear(xs[0], weights[0]), reference.linear(xs[0], weights[0]))
        row: dict[str, object] = {"what": f"{n}x{k} {name}", "tokens": m, "error": wrong}
        rows.append(row)
        if wrong > LIMIT:
            continue
        row["floor"] = bytes_read / RATE * 1e6
        calls = [lambda x=x, w=w: products.linear(x, w) for x, w in zip(xs, weights, strict=True)]
        row["us"] = replay_us(calls)
        row["bf16"] = replay_us([lambda x=x, w=w: x @ w.T for x, w in zip(xs, dense, strict=False)])
        if full:
            row["one"] = one_us(calls[:4])
            row["one_bf16"] = one_us([lambda x=x, w=w: x @ w.T for x, w in zip(xs, dense, strict=False)])
    return rows


def expert_weights(names: tuple[str, str, str]) -> tuple[Planes, Planes, Planes]:
    return (
        random_planes(names[0], UNITS, HIDDEN, EXPERTS),
        random_planes(names[1], UNITS, HIDDEN, EXPERTS),
        random_planes(names[2], HIDDEN, UNITS, EXPERTS),
    )


def moe_inputs(tokens: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    return [
        (torch.randn((tokens, HIDDEN), device="cuda", dtype=torch.bfloat16), *routing(tokens)) for _ in range(count)
    ]


def bench_moe(names: tuple[str, str, str], sweep: bool) -> list[dict[str, object]]:
    weights = expert_weights(names)
    size = sum(w.nbytes for w in weights) / EXPERTS
    rows: list[dict[str, object]] = []
    for tokens in MOE_TOKENS:
        inputs = moe_inputs(tokens, 3 if tokens > 256 else 10)
        x, ids, share = inputs[0]
        wrong = error(products.moe(x, *weights, ids, share), reference.moe(x, *weights, ids, share))
        row: dict[str, object] = {"what": f"MoE {'/'.join(names)}", "tokens": tokens, "error": wrong}
        rows.append(row)
        if wrong > LIMIT:
            continue
        row["floor"] = statistics.mean(i[1].unique().numel() for i in inputs) * size / RATE * 1e6
        calls = [lambda i=i: products.moe(i[0], *weights, i[1], i[2]) for i in inputs]
        row["us"] = replay_us(calls)
        row["one"] = one_us(calls[:4])
        row["kernels"] = kernel_us(calls)
        if sweep and tokens in SWEPT:
            row["sweep"] = sweep_moe(weights, inputs, tokens)
    return rows


def moe_launches(weights: tuple[Planes, Planes, Planes], tokens: int) -> list[tuple[Launch, Launch]]:
    """The table's choice, then one change at a time."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    pairs = tokens * TOPK
    a = launch.gate_up_launch(pairs, EXPERTS, UNITS, weights[0].supers, sms)
    b = launch.down_launch(pairs, EXPERTS, HIDDEN, weights[2].supers, sms)
    found = [(a, b)]
    found += [(replace(a, parts=p), b) for p in (1, 2, 4, 8) if tokens <= 64]
    found += [(replace(a, stages=s), b) for s in (2, 3, 4)]
    found += [(a, replace(b, stages=s)) for s in (2, 4)]
    found += [(a, replace(b, tiles=t)) for t in (1, 2, 4, 8)]
    found += [(replace(a, bm=m), replace(b, bm=m)) for m in (16, 32, 64) if tokens >= 256]
    found += [(replace(a, bn=128, warps=8), b), (a, replace(b, bn=128)), (a, replace(b, bn=128, warps=8))]
    return list(dict.fromkeys(found))


def linear_launches(m: int, n: int, supers: int) -> list[Launch]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    a = launch.linear_launch(m, n, supers, sms)
    found = [a, *(replace(a, parts=p) for p in (1, 2, 4, 8, 12) if p <= supers)]
    found += [replace(a, stages=s) for s in (2, 4)]
    found += [replace(a, bn=128), replace(a, bn=128, warps=8), replace(a, bn=128, parts=max(1, 2 * a.parts))]
    return list(dict.fromkeys(found))


def kernel_us(calls: list[Callable[[], object]]) -> dict[str, float]:
    """Mean microseconds of each kernel of a call, from the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return {e.key[:24]: e.device_time_total / len(calls) for e in found.key_averages() if e.device_time_total > 0}


def brief(c: Launch) -> str:
    return f"{c.bn}x{c.bm} parts {c.parts} tiles {c.tiles} warps {c.warps} stages {c.stages}"


def sweep_moe(
    weights: tuple[Planes, Planes, Planes], inputs: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], tokens: int
) -> list[dict[str, object]]:
    found = []
    for configs in moe_launches(weights, tokens):
        calls = [lambda i=i, c=configs: products.moe(i[0], *weights, i[1], i[2], configs=c) for i in inputs]
        try:
            found.append({"us": replay_us(calls, 8), "gate_up": brief(configs[0]), "down": brief(configs[1])})
        except Exception as problem:  # a launch that does not fit is a result of a sweep
            found.append({"us": float("inf"), "gate_up": brief(configs[0]), "problem": repr(problem)[:100]})
    return sorted(found, key=lambda f: f["us"])  # type: ignore[arg-type, return-value]


def sweep_linear(name: str, n: int, k: int) -> list[dict[str, object]]:
    copies = max(2, min(64, round(2.5e8 / (n * k * format_of(name).plane_bytes // 256))))
    weights = [random_planes(name, n, k) for _ in range(copies)]
    found: list[dict[str, object]] = []
    for m in (1, 16):
        xs = [torch.randn((m, k), device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        for config in linear_launches(m, n, k // 256):
            calls = [
                lambda x=x, w=w, c=config: products.linear(x, w, config=c) for x, w in zip(xs, weights, strict=True)
            ]
            found.append({"what": f"{n}x{k} {name}", "tokens": m, "us": replay_us(calls, 8), "launch": brief(config)})
    return sorted(found, key=lambda f: (f["tokens"], f["us"]))  # type: ignore[arg-type, return-value]


def check_types() -> dict[str, float]:
    """Worst error of every type at the issue's token counts, one small weight."""
    worst = {}
    for name in FORMATS:
        w = random_planes(name, 192, 512)
        tokens = (3, 64, 100, 512, 2048)
        xs = [torch.randn((m, 512), device="cuda", dtype=torch.bfloat16) for m in tokens]
        worst[name] = max(error(products.linear(x, w), reference.linear(x, w)) for x in xs)
    return worst


def warm(part: int, parts: int, sweep: bool) -> None:
    """Compile a share of all launches into Triton's cache, so that many processes share the work."""
    jobs: list[Callable[[], object]] = []
    for name in FORMATS:
        jobs += [
            lambda name=name, m=m: products.linear(
                torch.randn((m, 512), device="cuda").bfloat16(), random_planes(name, 192, 512)
            )
            for m in (3, 64, 512)
        ]
    for name in LINEAR_TYPES:
        for n, k in LINEAR_SHAPES:
            for m in LINEAR_TOKENS:
                options: list[Launch | None] = [None]
                if sweep and name == "Q4_K" and m in (1, 16) and (n, k) == LINEAR_SHAPES[0]:
                    options += linear_launches(m, n, k // 256)
                jobs += [
                    lambda n=n, k=k, m=m, name=name, c=c: products.linear(
                        torch.randn((m, k), device="cuda").bfloat16(), random_planes(name, n, k), config=c
                    )
                    for c in options
                ]
    for names in MOE_TYPES:
        few = (
            random_planes(names[0], UNITS, HIDDEN, 2),
            random_planes(names[1], UNITS, HIDDEN, 2),
            random_planes(names[2], HIDDEN, UNITS, 2),
        )
        for tokens in MOE_TOKENS:
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            base = (
                launch.gate_up_launch(tokens * TOPK, EXPERTS, UNITS, HIDDEN // 256, sms),
                launch.down_launch(tokens * TOPK, EXPERTS, HIDDEN, 1, sms),
            )
            options2 = moe_launches(few, tokens) if sweep and tokens in SWEPT and names == MOE_TYPES[0] else [base]
            ids = torch.zeros((tokens, TOPK), dtype=torch.int32, device="cuda")
            x = torch.randn((tokens, HIDDEN), device="cuda").bfloat16()
            jobs += [
                lambda few=few, x=x, ids=ids, c=c: products.moe(x, *few, ids, ids.float(), configs=c) for c in options2
            ]
    for k, job in enumerate(jobs):
        if k % parts == part:
            try:
                job()
            except Exception as problem:  # reported by the timed run
                print("warm:", repr(problem)[:200], file=sys.stderr)


def show(rows: list[dict[str, object]]) -> None:
    for row in rows:
        cells = [f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items() if k != "sweep"]
        print(" | ".join(cells), flush=True)
        for found in row.get("sweep", [])[:7]:  # type: ignore[attr-defined]
            print("    ", found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--sweep", action="store_true", help="also try other launch parameters")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--warm", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        warm(*args.warm, args.sweep)
        return 0
    began = time.monotonic()
    command = [sys.executable, __file__, *(["--sweep"] if args.sweep else []), "--warm"]
    helpers = [subprocess.Popen([*command, str(k), str(args.jobs)]) for k in range(args.jobs)]
    for helper in helpers:
        helper.wait()
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    torch.manual_seed(0)
    results: dict[str, object] = {"gpu": torch.cuda.get_device_name(), "types": check_types()}
    print("worst error of a type:", {k: f"{v:.2e}" for k, v in results["types"].items()}, flush=True)  # type: ignore[attr-defined]
    rows: list[dict[str, object]] = []
    for names in MOE_TYPES:
        found = bench_moe(names, args.sweep and names == MOE_TYPES[0])
        show(found)
        rows += found
    for name in LINEAR_TYPES:
        for n, k in LINEAR_SHAPES:
            found = bench_linear(name, n, k, full=name == "Q4_K")
            show(found)
            rows += found
    results["rows"] = rows
    if args.sweep:
        results["linear_sweep"] = sweep_linear("Q4_K", *LINEAR_SHAPES[0])
        for found in results["linear_sweep"]:  # type: ignore[attr-defined]
            print(found)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))
    print(f"done in {time.monotonic() - began:.0f} s")
    bad = [n for n, e in results["types"].items() if e > LIMIT] + [r["what"] for r in rows if r["error"] > LIMIT]  # type: ignore[attr-defined, operator]
    print("wrong:", bad or "nothing")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
