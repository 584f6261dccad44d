"""Measure a running OpenAI-compatible vLLM server: waves of streamed requests over concurrencies and prompt lengths.

Prompts have exactly the asked number of tokens (ids of sentences in an order of their own, so that no prefix is cached)
and answers exactly the asked number (the end token is ignored).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from glm5deploy.errors import DeployError
from glm5deploy.server.bench_figures import Trace, Wave, middle, summarise
from glm5deploy.server.bench_request import BenchTarget, get, measure, unreachable
from glm5deploy.server.bench_text import sentences
from glm5deploy.server.metrics_text import ServerCounters, read_counters


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """``concurrency`` requests at a time, prompts of ``prompts`` tokens, ``output`` tokens each, ``repeat`` waves."""

    concurrency: tuple[int, ...] = (1, 4, 16, 32, 64)
    prompts: tuple[int, ...] = (1024, 8192, 32768)
    output: int = 256
    repeat: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """One concurrency and prompt length. ``wave`` is None when the point was left out, ``note`` then says why.

    ``accepted`` is the share of draft tokens that the model accepted (None without speculative decoding).
    """

    concurrency: int
    prompt: int
    wave: Wave | None
    accepted: float | None = None
    note: str = ""


class Bench:
    """Measures ``target``. A context manager: it holds one connection for questions beside the measured ones."""

    def __init__(self, target: BenchTarget, settings: BenchSettings) -> None:
        self.target = target
        self.settings = settings
        self._http = target.connect()
        self._random = random.Random(settings.seed)
        self._ids: list[list[int]] = []

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def run(self, note: Callable[[str], None] = lambda _: None) -> Iterator[Point]:
        """Warm up, then yield a point for each prompt length and concurrency, shortest prompts first.

        Raises DeployError when the server fails a request; points that cannot fit are left out with a note.
        """
        self._ids = [self._tokenize(sentence) for sentence in sentences()]
        longest = self._longest_context()
        shortest = min(self.settings.prompts)
        note(f"warming up with a prompt of {shortest} tokens")
        self.wave(1, min(shortest, longest - self.settings.output) if longest else shortest)
        for prompt in sorted(self.settings.prompts):
            for concurrency in sorted(self.settings.concurrency):
                obstacle = self._obstacle(prompt, concurrency, longest)
                if obstacle:
                    yield Point(concurrency, prompt, None, note=obstacle)
                    continue
                note(f"{concurrency} × {prompt} tokens")
                before = self.counters()
                waves = [summarise(self.wave(concurrency, prompt)) for _ in range(self.settings.repeat)]
                after = self.counters()
                preempted = after.preemptions - before.preemptions
                yield Point(
                    concurrency,
                    prompt,
                    middle(waves),
                    accepted=after.accepted_since(before),
                    note=f"{preempted} preemptions" if preempted else "",
                )

    def wave(self, concurrency: int, prompt: int) -> list[Trace]:
        """``concurrency`` requests of ``prompt`` tokens sent at the same moment, each on its own connection."""
        bodies = [self._body(self.prompt(prompt)) for _ in range(concurrency)]
        clients = [self.target.connect() for _ in range(concurrency)]
        start = threading.Barrier(concurrency)

        def one(http: httpx.Client, body: dict[str, Any]) -> Trace:
            start.wait()
            return measure(http, body)

        with ThreadPoolExecutor(concurrency) as pool:
            try:
                return list(pool.map(one, clients, bodies))
            finally:
                # After a failure or Ctrl-C the other answers are not waited for: their connections go.
                for client in clients:
                    client.close()

    def prompt(self, tokens: int) -> list[int]:
        """Exactly ``tokens`` ids: sentences in random order, so that two prompts share no beginning."""
        ids: list[int] = []
        while len(ids) < tokens:
            for sentence in self._random.sample(self._ids, len(self._ids)):
                ids += sentence
        return ids[:tokens]

    def counters(self) -> ServerCounters:
        """The server's own counters; raises DeployError when it has none."""
        return read_counters(get(self._http, "/metrics").text)

    def _body(self, ids: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self.target.model,
            "prompt": list(ids),
            "max_tokens": self.settings.output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    def _tokenize(self, text: str) -> list[int]:
        body = {"model": self.target.model, "prompt": text, "add_special_tokens": False}
        try:
            response = self._http.post("/tokenize", json=body)
        except httpx.HTTPError as error:
            raise unreachable(self.target.base_url, error) from None
        ids = response.json().get("tokens") if response.status_code == 200 else None
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise DeployError(
                f"POST /tokenize: status {response.status_code}: {response.text[:200]}",
                hint="the benchmark asks vLLM's own endpoints; --url must point at a vLLM server",
            )
        return ids

    def _longest_context(self) -> int | None:
        listed = get(self._http, "/v1/models").json().get("data")
        lengths = [m.get("max_model_len") for m in listed or () if m.get("id") == self.target.model]
        return lengths[0] if lengths and type(lengths[0]) is int else None

    def _obstacle(self, prompt: int, concurrency: int, longest: int | None) -> str:
        needed = prompt + self.settings.output
        if longest is not None and needed > longest:
            return f"left out: needs a context of {needed} tokens, the server allows {longest}"
        capacity = self.counters().kv_tokens
        if capacity is not None and needed * concurrency > capacity:
            return f"left out: needs {needed * concurrency} tokens of KV cache, the server has {capacity}"
        return ""
