"""Mixed prefill and decode load on a server for ten minutes: no hang, no growth, no wrong answer.

    python scripts/soak.py --url http://127.0.0.1:8000 [--seconds 600] [--clients 24] [--compile-log FILE] [--json FILE]
    python scripts/soak.py --gguf FILE|FOLDER --out FOLDER    starts its own server, and stops it

Many clients send prompts of every length, streamed and not, closed midway, with shared prefixes, several answers or one
token. Meanwhile fixed prompts are asked again and again and compared with their answers before the load. Start the
server with a cache that is too small for all of them (`--num-gpu-blocks-override`), so that requests are preempted.
Prompts are token ids below --vocabulary. Figures are written every half minute, for a run may be cut off. Ends with a
table; exit status 1 when anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from soak_load import Drawer, Tally, client
from soak_server import running
from soak_verdict import judge, summary, table
from soak_watch import Canary, Deviations, Memory, ask_canary, canary_prompts, compare_canary, listener, watch_canaries

_EVERY = 30.0  # seconds between two words on progress


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", help="the server, without /v1")
    server.add_argument("--gguf", type=Path, help="start one over this GGUF set")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the server that is started")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="logs of the server that is started, figures")
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
    lines = (await http.get("/metrics")).text.split("\n")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{", 1)[0] == f"vllm:{name}")


def compile_events(log: Path | None) -> int:
    return log.read_bytes().count(b"\n") if log is not None and log.exists() else 0


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
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(chosen.clients):
                    group.create_task(client(http, model, drawer, until, tally))
                group.create_task(watch_canaries(http, model, known, until, seen))
                group.create_task(memory.watch(until))
                group.create_task(progress(chosen.json, tally, seen, memory, begun, until))
        except* psutil.NoSuchProcess:  # the clients would knock for the rest of the time
            seen.failures.append(f"the server ended {time.monotonic() - begun:.0f} s after the load began")
        ended = time.monotonic()
        failures = [*tally.failures, *seen.failures]
        preemptions = 0.0
        try:
            memory.sample()
            failures += await drained(http, 30.0)
            for prompt, before in known:
                compare_canary(before, await ask_canary(http, model, prompt), seen)
            preemptions = await metric(http, "num_preemptions_total") - preempted
        except (httpx.HTTPError, ValueError, LookupError, psutil.NoSuchProcess) as error:
            failures.append(f"after the load: {type(error).__name__}: {error}")
    figures = summary(tally, seen, memory, begun, ended)
    figures |= {"preemptions": preemptions, "compiled": compile_events(chosen.compile_log) - compiled}
    figures["failures"] = [*failures, *judge(figures, chosen)]
    return figures


async def progress(
    file: Path | None, tally: Tally, seen: Deviations, memory: Memory, begun: float, until: float
) -> None:
    """A line, and the figures so far, twice a minute."""
    while time.monotonic() < until:
        await asyncio.sleep(max(0.0, min(_EVERY, until - time.monotonic())))
        now, wrong = time.monotonic(), [*tally.failures, *seen.failures]
        line = (
            f"{now - begun:4.0f} s: {sum(tally.done.values())} requests, {tally.tokens} tokens, {len(wrong)} failures"
        )
        print(line, file=sys.stderr, flush=True)
        if file:
            so_far = summary(tally, seen, memory, begun, now)
            file.write_text(json.dumps({"unfinished": True, **so_far, "failures": wrong}, indent=1))


def run(chosen: argparse.Namespace) -> int:
    figures = asyncio.run(soak(chosen))
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1))
    print(table(figures))
    return 1 if figures["failures"] else 0


def main() -> int:
    chosen = arguments()
    if chosen.url:
        return run(chosen)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server is stopped then as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with running(chosen.gguf, chosen.out, chosen.device) as served:
        print(f"the server answers after {served.ready_seconds:.0f} s", file=sys.stderr, flush=True)
        chosen.url, chosen.pid = served.url, served.process.pid
        chosen.compile_log = chosen.out / "compile.jsonl"
        chosen.json = chosen.json or chosen.out / "soak.json"
        return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
