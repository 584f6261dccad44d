"""What scripts/soak.py watches beside the load: fixed questions with known answers, and the server's memory."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import psutil

CANARY_TOKENS = 16
SECONDS_BETWEEN_SAMPLES = 2.0

Tops = list[dict[str, float]]
"""Log-probabilities of the top 20 after each position, by token."""


@dataclass(frozen=True)
class Canary:
    """Answer to a fixed prompt: top 20 at the prompt's positions and at the decoded ones, and the decoded tokens."""

    prompted: Tops
    decoded: Tops
    tokens: list[str]


@dataclass
class Deviations:
    """Median |difference| of log-probabilities of answers under load from those before it."""

    prompted: list[float] = field(default_factory=list)
    decoded: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def canary_prompts(vocabulary: int, longest: int) -> list[list[int]]:
    draw = random.Random(20)
    lengths = sorted({min(length, longest) for length in (5, 63, 200, 700, 1500, 2100)})
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


async def ask_canary(http: httpx.AsyncClient, model: str, prompt: list[int], salt: str | None = None) -> Canary:
    """ValueError when refused. With log-probabilities of the prompt nothing comes from the prefix cache."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": CANARY_TOKENS, "temperature": 0}
    body |= {"logprobs": 20, "return_tokens_as_token_ids": True, "ignore_eos": True}
    body |= {"cache_salt": salt} if salt else {"prompt_logprobs": 20}
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}: {response.text[:300]}")
    choice = response.json()["choices"][0]
    entries = [entry for entry in choice.get("prompt_logprobs") or [] if entry]
    prompted = [{token: value["logprob"] for token, value in entry.items()} for entry in entries]
    return Canary(prompted, choice["logprobs"]["top_logprobs"], choice["logprobs"]["tokens"])


def difference(expected: Sequence[Mapping[str, float]], found: Sequence[Mapping[str, float]]) -> float:
    """Median over all positions and expected tokens; one that is not among those found counts as the last of them."""
    return median(
        abs(value - other.get(token, min(other.values())))
        for top, other in zip(expected, found, strict=True)
        for token, value in top.items()
    )


def compare_canary(before: Canary, now: Canary, seen: Deviations) -> None:
    """Decoded steps are compared as long as both answers have decoded the same tokens before."""
    if now.prompted:
        seen.prompted.append(difference(before.prompted, now.prompted))
    pairs = zip(before.tokens, now.tokens, strict=True)
    steps = next((i for i, (a, b) in enumerate(pairs) if a != b), len(now.tokens) - 1) + 1
    seen.decoded.append(difference(before.decoded[:steps], now.decoded[:steps]))


async def watch_canaries(
    http: httpx.AsyncClient, model: str, known: Sequence[tuple[list[int], Canary]], until: float, seen: Deviations
) -> None:
    """Ask them one after the other: computed afresh with all their positions, then as any request, then cached."""
    turn = 0
    while time.monotonic() < until:
        for prompt, before in known:
            salts = (None, f"turn {turn}", f"turn {turn}")
            for salt in salts:
                try:
                    compare_canary(before, await ask_canary(http, model, prompt, salt), seen)
                except (httpx.HTTPError, ValueError, LookupError) as error:
                    seen.failures.append(f"canary of {len(prompt)} tokens: {type(error).__name__}: {error}")
                    await asyncio.sleep(1.0)
        turn += 1


@dataclass(frozen=True)
class Sample:
    """MiB at a time; ``gpu`` is None where no GPU is seen."""

    at: float
    rss: float
    gpu: float | None


class Memory:
    """The server's processes and what they hold of every GPU."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self.samples: list[Sample] = []

    def sample(self) -> None:
        """psutil.NoSuchProcess when the server has ended."""
        if self._root.status() == psutil.STATUS_ZOMBIE:
            raise psutil.NoSuchProcess(self._root.pid)
        family = [self._root, *self._root.children(recursive=True)]
        rss = 0.0
        for process in family:
            try:
                rss += process.memory_info().rss / 2**20
            except psutil.NoSuchProcess:
                continue
        self.samples.append(Sample(time.monotonic(), rss, gpu_memory({process.pid for process in family})))

    async def watch(self, until: float) -> None:
        while time.monotonic() < until:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(SECONDS_BETWEEN_SAMPLES)

    def around(self, at: float, width: float = 10.0) -> Sample:
        """Medians of the samples nearest to a time: those within ``width`` seconds, or the nearest one."""
        near = [sample for sample in self.samples if abs(sample.at - at) <= width]
        near = near or [min(self.samples, key=lambda sample: abs(sample.at - at))]
        gpu = [sample.gpu for sample in near if sample.gpu is not None]
        return Sample(at, median(sample.rss for sample in near), median(gpu) if gpu else None)


def gpu_memory(pids: set[int]) -> float | None:
    """MiB that these processes hold of the visible GPUs, or all do if nvidia-smi names none; None without it."""
    apps = _nvidia_smi("--query-compute-apps=pid,used_memory")
    ours = [float(row[1]) for row in apps if row[0].isdigit() and int(row[0]) in pids and row[1].isdigit()]
    everybody = [] if ours else [float(row[0]) for row in _nvidia_smi("--query-gpu=memory.used")]
    return sum(ours or everybody) if ours or everybody else None


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):  # others may start and stop on the other GPUs
        command += ["-i", visible]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in listed.splitlines() if line]


def listener(port: int) -> psutil.Process:
    """The process that listens on the port, or rather the first of its process group; LookupError without one."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return psutil.Process(connection.pid)
    raise LookupError(f"no process of ours listens on port {port}; name the server's with --pid")
