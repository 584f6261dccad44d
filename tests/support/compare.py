"""The one place for tolerances, and the comparisons that use them.

Log-probabilities are compared by the median over the expected top 20 of a prompt's positions: means and maxima hang on
single flips of an expert or of a selected token, which honest rounding causes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median

import torch

from tests.support.goldens import Reference

# Median |difference| of log-probabilities of a prompt, by the served type: up to 130 tokens, and from 300 on.
LOGPROB_MEDIAN = {"float32": (0.03, 0.03), "bfloat16": (0.15, 0.20)}
LONG_PROMPT = 300
# Selected positions that are not the reference's, of 64, averaged over layers and positions.
SELECTED_MEAN = 2.0
# A greedy step is comparable while the expected choice leads by this much, by the served type.
GREEDY_MARGIN = {"float32": 0.5, "bfloat16": 1.0}
# Decoded steps against a forward pass in fp32: median |difference| of a request's, and of all requests' together.
# Positions of a prompt differ by 0.05 to 0.09 in bf16, and a median over few steps varies: up to 0.16 was seen over 96
# of them. Dense attention or another schedule gives 0.3 to 2.5. "far" is for contexts of more than 64 positions for
# each that is selected: more of them lie near the limit there, and rounding swaps two and a half times as many.
STEPS_MEDIAN = {"float32": (0.03, 0.03), "bfloat16": (0.25, 0.15), "far": (0.40, 0.30)}
# A step whose own median is further off than this had an expert or a selected position flipped: one in a hundred, so
# the share of those, and how many a small sample may have all the same.
LOST_STEP, LOST_STEPS, LOST_BY_CHANCE = 1.0, 0.05, 3
# Median |difference| of a decode step's log-probabilities from those of the same position in a prompt, by type: in
# bf16 both are as far from the reference as LOGPROB_MEDIAN allows, and not in the same direction.
DECODE_MEDIAN = {"float32": 0.03, "bfloat16": 0.25}
# Relative root mean square error of tensors, by type.
TENSOR_RMS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}


def logprob_differences(expected: Sequence[tuple[int, float]], served: Mapping[int, float]) -> list[float]:
    """|difference| per expected token; one that the server does not list is taken to be as likely as its 20th."""
    twentieth = sorted(served.values(), reverse=True)[:20][-1]
    return [abs(value - served.get(token, twentieth)) for token, value in expected]


def logprob_median(reference: Reference, served: Mapping[int, Mapping[int, float]]) -> float:
    """Median over all expected tokens of all compared positions; a position the server left out is an error."""
    return median(d for position, top in reference.top.items() for d in logprob_differences(top, served[position]))


def logprob_limit(dtype: str, prompt_length: int) -> float:
    short, long = LOGPROB_MEDIAN[dtype]
    return long if prompt_length >= LONG_PROMPT else short


def selected_difference(reference: Reference, served: Mapping[tuple[int, int], frozenset[int]]) -> float:
    """Average over (layer, position) of how many selected positions the reference did not select."""
    assert reference.selected, "the reference compares no selections"
    for key, expected in reference.selected.items():
        assert len(served[key]) == len(expected), f"{key}: {len(served[key])} positions, expected {len(expected)}"
    return mean(len(served[key] - expected) for key, expected in reference.selected.items())


def comparable_steps(reference: Reference, dtype: str = "float32") -> int:
    """Greedy steps before the first that rounding may decide otherwise."""
    return next((i for i, m in enumerate(reference.margins) if m < GREEDY_MARGIN[dtype]), len(reference.margins))


def decode_median(decoded: Mapping[int, Mapping[int, float]], prompted: Mapping[int, Mapping[int, float]]) -> float:
    """Median |difference| of the top 20 at the positions of both: decoded step by step, and as parts of a prompt."""
    positions = decoded.keys() & prompted.keys()
    assert positions, "no position was both decoded and part of a prompt"
    return median(
        d for position in positions for d in logprob_differences([*decoded[position].items()], prompted[position])
    )


def check_steps(requests: Sequence[Sequence[Sequence[float]]], precision: str) -> str:
    """AssertionError when decoded steps are off; otherwise a line that says how far they are.

    ``requests`` holds, for every request and step, the |differences| over the expected top 20.
    """
    steps = [median(step) for request in requests for step in request]
    medians = [median(d for step in request for d in step) for request in requests]
    overall = median(d for request in requests for step in request for d in step)
    lost = sum(not value <= LOST_STEP for value in steps)
    of_one, of_all = STEPS_MEDIAN[precision]
    found = f"{len(steps)} steps: median {overall:.3f}, a request's at most {max(medians):.3f}, {lost} steps lost"
    assert all(value <= of_one for value in medians), f"{found}; {[round(value, 3) for value in medians]}"
    assert overall <= of_all, found
    assert lost <= max(LOST_BY_CHANCE, LOST_STEPS * len(steps)), found
    return found


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square error over that of ``expected``; NaN and infinities must stand in the same places."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} is not {tuple(expected.shape)}"
    a, e = actual.double(), expected.double()
    assert torch.equal(a.isnan(), e.isnan()), "NaN in other places"
    infinite = a.isinf() | e.isinf()
    assert torch.equal(a[infinite], e[infinite]), "infinities in other places or of another sign"
    keep = ~(infinite | e.isnan())
    norm = e[keep].pow(2).mean().sqrt() if keep.any() else torch.tensor(0.0)
    error = (a[keep] - e[keep]).pow(2).mean().sqrt() if keep.any() else torch.tensor(0.0)
    return float(error / norm) if norm > 0 else float(error)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float | None = None) -> None:
    """``limit``: by ``actual``'s type when absent."""
    allowed = TENSOR_RMS[actual.dtype] if limit is None else limit
    error = relative_rms(actual, expected)
    assert error <= allowed, f"relative RMS error {error:.2e}, allowed {allowed:.0e}"
