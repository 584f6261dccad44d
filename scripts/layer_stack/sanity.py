"""Whether the engine's answers are those of a model with sound activations: finite, spread, and its own again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import httpx


def ask(url: str, model: str, prompt: Sequence[int], tokens: int = 32) -> dict[str, Any]:
    """The greedy answer to a prompt of token ids, with the log-probabilities of its tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=300, trust_env=False)
    response.raise_for_status()
    found: dict[str, Any] = response.json()["choices"][0]["logprobs"]
    return found


def judge(answers: Sequence[dict[str, Any]]) -> str:
    """One line on the answers to different prompts; RuntimeError when they are not those of a working model.

    A NaN anywhere in a forward pass makes every token the same, or a log-probability that is no number.
    """
    chosen = [answer["tokens"] for answer in answers]
    numbers = [value for answer in answers for value in answer["token_logprobs"]]
    broken = [value for value in numbers if value is None or not math.isfinite(value)]
    kinds = {token for tokens in chosen for token in tokens}
    if broken or len({tuple(tokens) for tokens in chosen}) < len(chosen) or len(kinds) <= len(chosen):
        raise RuntimeError(
            f"not the answers of a working model: {len(broken)} of {len(numbers)} log-probabilities are no numbers, "
            f"{len(kinds)} different tokens in {len(chosen)} answers, which begin {[t[:4] for t in chosen]}"
        )
    mean = sum(numbers) / len(numbers)
    return (
        f"sound: {len(kinds)} different tokens in {len(chosen)} greedy answers of {len(chosen[0])}, "
        f"mean log-probability {mean:.2f}, {min(numbers):.2f} to {max(numbers):.2f}"
    )
