"""The load of scripts/soak.py: requests of every kind a server meets, and what becomes of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from glm5deploy.server.event_stream import answer_events_async

SHARED_PREFIX = 1500  # tokens that requests of the kind "prefix" begin with
# Kind of request and how often it is drawn, of 100.
KINDS = {"short": 26, "medium": 18, "long": 10, "prefix": 14, "one token": 10, "several": 8, "aborted": 14}


@dataclass(frozen=True)
class Request:
    """``abort_after`` events the client closes the stream (0: before the first one)."""

    kind: str
    prompt: list[int]
    max_tokens: int
    stream: bool
    answers: int = 1
    temperature: float = 0.0
    abort_after: int | None = None

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.answers}
        body |= {"temperature": self.temperature, "ignore_eos": True}
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return body


@dataclass
class Tally:
    """What the load has seen so far; ``gaps`` are seconds a token between two events of a stream."""

    done: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Drawer:
    """Draws requests from a fixed seed: ordinary token ids below ``vocabulary``, prompts of up to ``longest``."""

    def __init__(self, seed: int, vocabulary: int, longest: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary, self._longest = vocabulary, longest
        self._prefixes = [self._ids(min(SHARED_PREFIX, longest // 2)) for _ in range(3)]

    def draw(self) -> Request:
        pick = self._random
        (kind,) = pick.choices([*KINDS], weights=[*KINDS.values()])
        short, medium = min(256, self._longest), min(2048, self._longest)
        tokens, stream = pick.randint(2, 64), pick.random() < 0.7
        if kind == "short":
            return Request(kind, self._ids(pick.randint(1, short)), tokens, stream)
        if kind == "medium":
            return Request(kind, self._ids(pick.randint(short, medium)), tokens, stream, temperature=0.7)
        if kind == "long":
            # Lengths from medium to the longest, as many between 2,000 and 4,000 as between 4,000 and 8,000.
            length = round(medium * (self._longest / medium) ** pick.random())
            return Request(kind, self._ids(length), pick.randint(2, 24), stream)
        if kind == "prefix":
            suffix = self._ids(pick.randint(1, short))
            return Request(kind, (pick.choice(self._prefixes) + suffix)[: self._longest], tokens, stream)
        if kind == "one token":
            return Request(kind, self._ids(pick.randint(1, medium)), 1, stream)
        if kind == "several":
            return Request(kind, self._ids(pick.randint(1, short)), tokens, stream, answers=4, temperature=0.9)
        return Request(kind, self._ids(pick.randint(1, medium)), 64, True, abort_after=pick.randint(0, 20))

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(self._vocabulary) for _ in range(length)]


async def client(http: httpx.AsyncClient, model: str, drawer: Drawer, until: float, tally: Tally) -> None:
    """One client: a request after the other until the clock says ``until``."""
    while time.monotonic() < until:
        request = drawer.draw()
        try:
            await send(http, model, request, tally)
            tally.done[request.kind] += 1
        except (httpx.HTTPError, ValueError, LookupError) as error:
            size = f"{len(request.prompt)} tokens, {request.max_tokens} asked, stream {request.stream}"
            tally.failures.append(f"{request.kind} ({size}): {type(error).__name__}: {error}")
            await asyncio.sleep(1.0)  # a dead server would be asked a thousand times a second


async def send(http: httpx.AsyncClient, model: str, request: Request, tally: Tally) -> None:
    """ValueError for an answer that is refused, broken off or short of tokens; httpx.ReadTimeout for a stall."""
    body = request.body(model)
    if not request.stream:
        response = await http.post("/v1/completions", json=body)
        _require_ok(response.status_code, response.text)
        usage = response.json()["usage"]
    else:
        usage = await _stream(http, body, request, tally)
        if usage is None:
            return
    tally.prompt_tokens += usage["prompt_tokens"]
    tally.tokens += usage["completion_tokens"]
    if usage["completion_tokens"] != request.max_tokens * request.answers:
        raise ValueError(f"{usage['completion_tokens']} tokens came, {request.max_tokens} x {request.answers} asked")


async def _stream(
    http: httpx.AsyncClient, body: dict[str, Any], request: Request, tally: Tally
) -> dict[str, int] | None:
    """The last usage that the stream names; None when the client closed it."""
    usage: dict[str, int] = {}
    begun = last = time.monotonic()
    counted = events = 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            _require_ok(response.status_code, (await response.aread()).decode(errors="replace"))
        if request.abort_after == 0:
            return None
        async for data in answer_events_async(response):
            event, now = json.loads(data), time.monotonic()
            if "error" in event:
                raise ValueError(f"the server broke off: {event['error']}")
            usage = event.get("usage") or usage
            tokens = usage.get("completion_tokens", 0)
            if tokens > counted and request.answers == 1:
                if counted:
                    tally.gaps += [(now - last) / (tokens - counted)] * (tokens - counted)
                else:
                    tally.first.append(now - begun)
                counted, last = tokens, now
            events += 1
            if request.abort_after is not None and events >= request.abort_after:
                return None
    return usage


def _require_ok(status: int, text: str) -> None:
    if status != 200:
        raise ValueError(f"status {status}: {text[:300]}")
