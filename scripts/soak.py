"""Mixed prefill and decode load on a running server for ten minutes: no hang, no growth, no wrong answer.

    python scripts/soak.py --url http://127.0.0.1:8000 [--seconds 600] [--clients 24] [--compile-log FILE] [--json FILE]

Many clients send prompts of every length, streamed and not, closed midway, with shared prefixes, several answers or one
token. Meanwhile fixed prompts are asked again and again and compared with their answers before the load. Start the
server with a cache that is too small for all of them (`--num-gpu-blocks-override`), so that requests are preempted.
Prompts are token ids below --vocabulary. Ends with a table; exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil
from soak_load import KINDS, Drawer, Tally, client
from soak_watch import Canary, Deviations, Memory, ask_canary, canary_prompts, compare_canary, listener, watch_canaries

# Median |difference| of log-probabilities: of a prompt, of one answer's decoded steps, of all decoded steps.
PROMPTED, DECODED, ALL_DECODED = 0.15, 1.0, 0.15
SETTLED = 60.0  # seconds of load after which memory must not grow any more


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, without /v1")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt (the model's context less 128)")
    parser.add_argument("--vocabulary", type=int, default=990, help="token ids of prompts are below this")
    parser.add_argument("--pid", type=int, help="the server's process, if not the one that listens")
    parser.add_argument("--stall", type=float, default=60.0, help="seconds without a token that count as a hang")
    parser.add_argument("--rss-growth", type=float, default=256.0, help="MiB allowed after the first minute")
    parser.add_argument("--gpu-growth", type=float, default=64.0, help="MiB allowed after the first minute")
    parser.add_argument("--compile-log", type=Path, help="the server's GLM5DEPLOY_COMPILE_LOG")
    parser.add_argument("--preemptions", type=int, default=0, help="how many there must be at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    return parser.parse_args()


async def metric(http: httpx.AsyncClient, name: str) -> float:
    """Sum of a metric of vLLM's over its labels; 0 when it is not there."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{", 1)[0] == f"vllm:{name}")


def compile_events(log: Path | None) -> int:
    return len(log.read_text().splitlines()) if log is not None and log.exists() else 0


async def drained(http: httpx.AsyncClient, seconds: float) -> list[str]:
    """Nothing once the server holds no request and no block any more; otherwise what it still holds."""
    deadline = time.monotonic() + seconds
    while True:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        left = {name: await metric(http, name) for name in names}
        if not any(left.values()):
            return []
        if time.monotonic() > deadline:
            return [f"still held {seconds:.0f} s after the last request: {left}"]
        await asyncio.sleep(0.5)


async def soak(chosen: argparse.Namespace) -> dict[str, Any]:
    """All figures, with ``failures`` among them."""
    timeout = httpx.Timeout(30.0, read=chosen.stall)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=chosen.url, timeout=timeout, limits=limits, trust_env=False) as http:
        served = (await http.get("/v1/models")).json()["data"][0]
        model, longest = served["id"], chosen.longest or served["max_model_len"] - 128
        root = psutil.Process(chosen.pid) if chosen.pid else listener(httpx.URL(chosen.url).port or 80)
        memory, tally, seen = Memory(root), Tally(), Deviations()
        drawer = Drawer(chosen.seed, chosen.vocabulary, longest)
        known: list[tuple[list[int], Canary]] = []
        for prompt in canary_prompts(chosen.vocabulary, longest):
            known.append((prompt, await ask_canary(http, model, prompt)))
        memory.sample()
        compiled, preempted = compile_events(chosen.compile_log), await metric(http, "num_preemptions_total")
        begun = time.monotonic()
        until = begun + chosen.seconds
        clients = [client(http, model, drawer, until, tally) for _ in range(chosen.clients)]
        canaries = watch_canaries(http, model, known, until, seen)
        await asyncio.gather(*clients, canaries, memory.watch(until), progress(tally, seen, begun, until))
        ended = time.monotonic()
        memory.sample()
        failures = [*tally.failures, *seen.failures]
        try:
            failures += await drained(http, 30.0)
            for prompt, before in known:
                compare_canary(before, await ask_canary(http, model, prompt), seen)
            preemptions = await metric(http, "num_preemptions_total") - preempted
        except (httpx.HTTPError, ValueError, LookupError) as error:
            failures.append(f"after the load: {type(error).__name__}: {error}")
            preemptions = 0.0
    figures = summary(tally, seen, memory, begun, ended)
    figures |= {"preemptions": preemptions, "compiled": compile_events(chosen.compile_log) - compiled}
    figures["failures"] = [*failures, *judge(figures, chosen)]
    return figures


async def progress(tally: Tally, seen: Deviations, begun: float, until: float) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(max(0.0, min(30.0, until - time.monotonic())))
        spent, wrong = time.monotonic() - begun, len(tally.failures) + len(seen.failures)
        line = f"{spent:4.0f} s: {sum(tally.done.values())} requests, {tally.tokens} tokens, {wrong} failures"
        print(line, file=sys.stderr, flush=True)


def summary(tally: Tally, seen: Deviations, memory: Memory, begun: float, ended: float) -> dict[str, Any]:
    seconds = ended - begun
    times = {"start": begun, "settled": begun + min(SETTLED, seconds / 3), "mid": begun + seconds / 2, "end": ended}
    marks = {name: memory.around(at) for name, at in times.items()}
    return {
        "seconds": seconds,
        "requests": dict(tally.done),
        "prompt tokens/s": tally.prompt_tokens / seconds,
        "tokens/s": tally.tokens / seconds,
        "gap": percentiles(tally.gaps),
        "first": percentiles(tally.first),
        "rss": {name: mark.rss for name, mark in marks.items()},
        "gpu": {name: mark.gpu for name, mark in marks.items()},
        "canaries": len(seen.decoded),
        "prompted": max(seen.prompted, default=float("nan")),
        "decoded": max(seen.decoded, default=float("nan")),
        "all decoded": median(seen.decoded) if seen.decoded else float("nan"),
    }


def percentiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile in milliseconds."""
    if len(values) < 2:
        return float("nan"), float("nan")
    cuts = quantiles(values, n=100)
    return cuts[49] * 1000, cuts[98] * 1000


def judge(figures: dict[str, Any], chosen: argparse.Namespace) -> list[str]:
    """What is wrong with the figures; NaN never passes."""
    rules = [("prompted", PROMPTED), ("decoded", DECODED), ("all decoded", ALL_DECODED), ("compiled", 0)]
    found = [f"{name} is {figures[name]:.3g}, allowed {limit}" for name, limit in rules if not figures[name] <= limit]
    for name, limit in (("rss", chosen.rss_growth), ("gpu", chosen.gpu_growth)):
        start, end = figures[name]["settled"], figures[name]["end"]
        if start is not None and not end - start <= limit:
            found.append(f"{name} grew by {end - start:.0f} MiB after it had settled, allowed {limit:.0f}")
    if figures["preemptions"] < chosen.preemptions:
        found.append(f"{figures['preemptions']:.0f} preemptions, {chosen.preemptions} needed: the cache is too large")
    missing = set(KINDS) - set(figures["requests"])
    return [*found, *([f"no request of these kinds ended well: {sorted(missing)}"] if missing else [])]


def table(figures: dict[str, Any]) -> str:
    requests = figures["requests"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(requests.items()))
    lines = [
        f"{figures['seconds']:.0f} s: {sum(requests.values())} requests ({kinds})",
        f"tokens a second: {figures['prompt tokens/s']:.0f} of prompts, {figures['tokens/s']:.0f} decoded",
        "milliseconds, p50 and p99: {:.1f} and {:.1f} a token, {:.0f} and {:.0f} to the first".format(
            *figures["gap"], *figures["first"]
        ),
        f"{figures['preemptions']:.0f} preemptions, {figures['compiled']} kernels compiled during the load",
        f"canaries: {figures['canaries']} answers; worst prompt {figures['prompted']:.3f}, worst decoding "
        f"{figures['decoded']:.3f}, median decoding {figures['all decoded']:.3f}",
    ]
    for name in ("rss", "gpu"):
        marks = (f"{at} {'-' if mib is None else f'{mib:.0f}'}" for at, mib in figures[name].items())
        lines.append(f"{name} MiB: {', '.join(marks)}")
    lines += [f"FAILURE {text}" for text in figures["failures"][:20]]
    lines.append(f"{len(figures['failures'])} failures")
    return "\n".join(lines)


def main() -> int:
    chosen = arguments()
    figures = asyncio.run(soak(chosen))
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
