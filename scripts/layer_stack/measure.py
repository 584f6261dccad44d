"""Decode steps and prefill of a running server, in the waves of `glm5deploy bench`; torch profiles of some steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from glm5deploy.server.bench import Bench, BenchSettings, Point
from glm5deploy.server.bench_figures import Trace
from glm5deploy.server.bench_request import BenchTarget
from glm5deploy.server.event_stream import answer_events

_PATIENCE = 300.0


@dataclass(frozen=True)
class Wanted:
    """``decode`` batches at a context of ``context`` tokens, ``output`` tokens each; ``prefill`` lengths."""

    context: int = 4096
    output: int = 128
    decode: tuple[int, ...] = (1, 8, 32)
    prefill: tuple[int, ...] = (2048, 8192)
    prefill_batches: tuple[int, ...] = (1, 4)


@dataclass(frozen=True)
class Steps:
    """Decode steps of ``batch`` requests with ``context`` tokens before them, while all of them decode.

    ``mean`` is tokens over time, ``median`` that of the times between a request's tokens; milliseconds.
    """

    batch: int
    context: int
    mean: float
    median: float


def decode_steps(url: str, model: str, wanted: Wanted, batch: int, note: Callable[[str], None]) -> Steps:
    """The fastest of three waves of ``batch`` requests; of a large batch, whose prompts take long, one wave.

    The fastest: what is slower had something else in it, kernels that were met for the first time among them.
    """
    prompt = wanted.context - wanted.output // 2
    # Warms up, and makes the benchmark's prompts.
    settings = BenchSettings((1,), (min(256, prompt),), wanted.output, seed=batch)
    with Bench(BenchTarget(url, model), settings) as bench:
        list(bench.run(note))
        waves = [bench.wave(batch, prompt) for _ in range(3 if batch <= 8 else 1)]
    return min((steps_of(batch, prompt, traces) for traces in waves), key=lambda found: found.mean)


def steps_of(batch: int, context: int, traces: Sequence[Trace]) -> Steps:
    """The figures of one wave; ValueError when there was no time in which all requests decoded."""
    begin, end = max(trace.first for trace in traces), min(trace.last for trace in traces)
    gaps = [
        1e3 * (at - before) / (tokens - fewer)
        for trace in traces
        for (before, fewer), (at, tokens) in pairwise(trace.arrivals)
        if begin <= before and at <= end
    ]
    tokens = sum(trace.tokens_until(end) - trace.tokens_until(begin) for trace in traces)
    if not gaps or not tokens:
        raise ValueError(f"{batch} requests never decoded at the same time: their answers are too short")
    return Steps(batch, context, 1e3 * (end - begin) * batch / tokens, median(gaps))


def prefill_rates(url: str, model: str, wanted: Wanted, note: Callable[[str], None]) -> list[Point]:
    settings = BenchSettings(wanted.prefill_batches, wanted.prefill, output=2, repeat=2, seed=1)
    with Bench(BenchTarget(url, model), settings) as bench:
        return list(bench.run(note))


class Profiler:
    """Takes profiles of a server that was started with vLLM's torch profiler; traces appear in ``folder``."""

    def __init__(self, url: str, model: str, vocabulary: int, folder: Path) -> None:
        self._http = httpx.Client(base_url=url, timeout=_PATIENCE, trust_env=False)
        self._model, self._vocabulary, self._folder = model, vocabulary, folder

    def decode(self, batch: int, prompt: int, output: int, seconds: float) -> Path:
        """The trace of ``seconds`` in which ``batch`` requests decode, each with ``prompt`` tokens before it."""
        running, over = threading.Barrier(batch + 1), threading.Event()
        bodies = [{**self._body(seed, prompt, output), "stream": True} for seed in range(batch)]
        with ThreadPoolExecutor(batch) as pool:
            streams = [pool.submit(self._stream, body, running, over) for body in bodies]
            try:
                running.wait(_PATIENCE)
                time.sleep(0.3)
                trace = self._profile(lambda: time.sleep(seconds))
            finally:
                running.abort()
                over.set()
            for stream in streams:
                stream.result()
        return trace

    def prefill(self, prompt: int) -> Path:
        """The trace of one prompt's prefill and the decode step after it."""
        return self._profile(lambda: self._post("/v1/completions", self._body(99, prompt, 2)))

    def _profile(self, work: Callable[[], object]) -> Path:
        before = set(self._traces())
        self._post("/start_profile", None)
        work()
        self._post("/stop_profile", None)
        new = set(self._traces()) - before
        if not new:
            raise RuntimeError(f"no trace appeared in {self._folder}")
        return max(new, key=lambda path: path.stat().st_size)

    def _traces(self) -> list[Path]:
        return [path for path in self._folder.rglob("*.json*") if path.stat().st_size]

    def _stream(self, body: dict[str, Any], running: threading.Barrier, over: threading.Event) -> None:
        """Decode until told to stop; closing the connection ends the request."""
        try:
            with self._http.stream("POST", "/v1/completions", json=body) as response:
                events = answer_events(response)
                next(events)
                running.wait(_PATIENCE)
                for _ in events:
                    if over.is_set():
                        return
        except BaseException:
            running.abort()
            raise

    def _body(self, seed: int, prompt: int, output: int) -> dict[str, Any]:
        ids = [(seed * 7919 + 31 * i * i + i) % (self._vocabulary - 100) for i in range(prompt)]
        return {"model": self._model, "prompt": ids, "max_tokens": output, "ignore_eos": True}

    def _post(self, path: str, body: dict[str, Any] | None) -> None:
        response = self._http.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"POST {path}: {response.status_code} {response.text[:300]}")
