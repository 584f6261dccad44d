"""Decode steps and prefill of a running server, in the waves of `glm5deploy bench`; torch profiles of some steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from glm5deploy.server.bench import Bench, BenchSettings, Point
from glm5deploy.server.bench_request import BenchTarget

_PATIENCE = 300.0


@dataclass(frozen=True)
class Wanted:
    """``decode`` batches at a context of ``context`` tokens, ``output`` tokens each; ``prefill`` lengths."""

    context: int = 4096
    output: int = 192
    decode: tuple[int, ...] = (1, 8, 32)
    prefill: tuple[int, ...] = (2048, 8192)
    prefill_batches: tuple[int, ...] = (1, 4)


def decode_steps(url: str, model: str, wanted: Wanted, note: Callable[[str], None]) -> list[Point]:
    """The middle of three waves of each batch; of large ones, whose prompts take long, one wave."""
    points: list[Point] = []
    for batch in wanted.decode:
        prompts = (wanted.context - wanted.output // 2,)
        settings = BenchSettings((batch,), prompts, wanted.output, repeat=3 if batch <= 8 else 1, seed=batch)
        with Bench(BenchTarget(url, model), settings) as bench:
            points += bench.run(note)
    return points


def prefill_rates(url: str, model: str, wanted: Wanted, note: Callable[[str], None]) -> list[Point]:
    settings = BenchSettings(wanted.prefill_batches, wanted.prefill, output=2, repeat=3, seed=1)
    with Bench(BenchTarget(url, model), settings) as bench:
        return list(bench.run(note))


def step_ms(point: Point) -> float | None:
    """Milliseconds of a step in which every request of the wave decodes."""
    if point.wave is None or not point.wave.decode_rate:
        return None
    return 1e3 * point.concurrency / point.wave.decode_rate


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
                lines = response.iter_lines()
                next(lines)
                running.wait(_PATIENCE)
                for _ in lines:
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
