"""What scripts/soak.py makes of what it has seen: figures, what is wrong with them, and a table."""

from __future__ import annotations

import argparse
from statistics import median, quantiles
from typing import Any

from soak_load import KINDS, Tally
from soak_watch import Deviations, Memory

# Median |difference| of log-probabilities: of a prompt, of one answer's decoded steps, of all decoded steps.
PROMPTED, DECODED, ALL_DECODED = 0.15, 1.0, 0.15
SETTLED = 60.0  # seconds of load after which memory must not grow any more


def summary(tally: Tally, seen: Deviations, memory: Memory, begun: float, ended: float) -> dict[str, Any]:
    """Figures of the load from ``begun`` to ``ended``, by the monotonic clock."""
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
    """The figures to read, failures last."""
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
