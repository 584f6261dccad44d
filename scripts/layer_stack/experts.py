"""Which experts the tokens of a batch go to, as the engine reports it, against a draw without preference."""

from __future__ import annotations

import base64
import io
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import numpy as np

from glm5deploy.glm_dsa.hparams import Hparams


@dataclass(frozen=True)
class Spread:
    """``distinct`` experts that a step of ``batch`` tokens needs, by layer; ``uniform`` if all were equally likely."""

    batch: int
    distinct: tuple[float, ...]
    uniform: float

    def lines(self) -> Iterator[str]:
        layers = self.distinct
        yield (
            f"experts of a step of {self.batch} tokens: {statistics.mean(layers):.1f} a layer on average "
            f"({min(layers):.0f} to {max(layers):.0f}; first layers {[round(n) for n in layers[:3]]}, last "
            f"{[round(n) for n in layers[-3:]]}); {self.uniform:.1f} if all were equally likely"
        )


def spread(url: str, model: str, vocabulary: int, batch: int, hparams: Hparams) -> Spread:
    """Ask for ``batch`` answers to different prompts at once; the tokens of their last steps are one batch."""
    rng = np.random.default_rng(3)

    def ask(prompt: list[int]) -> np.ndarray:
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "ignore_eos": True}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        response.raise_for_status()
        packed = response.json()["choices"][0]["routed_experts"]
        if packed is None:
            raise RuntimeError("the engine does not report experts")
        table: np.ndarray = np.load(io.BytesIO(base64.b64decode(packed)), allow_pickle=False)
        return table

    prompts = [rng.integers(0, vocabulary - 100, 64).tolist() for _ in range(batch)]
    with ThreadPoolExecutor(batch) as pool:
        tables = list(pool.map(ask, prompts))  # each [tokens, layers, experts a token]
    routed = range(hparams.num_dense_layers, hparams.num_layers)
    places = range(-8, 0)
    distinct = tuple(
        statistics.mean(len({int(e) for table in tables for e in table[place, layer]}) for place in places)
        for layer in routed
    )
    missed = (1 - hparams.num_experts_used / hparams.num_experts) ** batch
    return Spread(batch, distinct, hparams.num_experts * (1 - missed))
