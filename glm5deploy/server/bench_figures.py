"""What the arrival times of streamed tokens say: the arithmetic of a benchmark, apart from how they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trace:
    """One streamed answer. ``arrivals`` holds (seconds, tokens generated so far) of every piece that brought tokens,
    on the same clock as ``sent``; both grow. A piece brings several tokens where drafts were accepted.
    """

    sent: float
    arrivals: tuple[tuple[float, int], ...]
    prompt_tokens: int

    def __post_init__(self) -> None:
        if not self.arrivals:
            raise ValueError("an answer without a token has no times")

    @property
    def first(self) -> float:
        return self.arrivals[0][0]

    @property
    def last(self) -> float:
        return self.arrivals[-1][0]

    @property
    def tokens(self) -> int:
        return self.arrivals[-1][1]

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first piece; None for an answer of one piece."""
        later = self.tokens - self.arrivals[0][1]
        return (self.last - self.first) / later if later else None

    def tokens_until(self, moment: float) -> int:
        """Tokens that had arrived at ``moment``."""
        return next((tokens for at, tokens in reversed(self.arrivals) if at <= moment), 0)


@dataclass(frozen=True, slots=True)
class Wave:
    """Figures of requests that were sent together. Times in seconds, rates in tokens per second.

    ``output_rate`` counts all answers' tokens over the whole time, queueing and prefill included. ``decode_rate`` looks
    only at the time in which every request was decoding, the figure that others publish as tok/s at a concurrency; None
    where the first request had ended before the last one began. ``prefill_rate`` is prompt tokens over the time to the
    last first token.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_rate: float
    decode_rate: float | None
    prefill_rate: float
    ttft_median: float
    ttft_p95: float
    tpot_median: float | None
    tpot_p95: float | None


def summarise(traces: Sequence[Trace]) -> Wave:
    """The figures of one wave; ValueError for an empty one. ``prompt_tokens`` is the mean of a request, rounded."""
    if not traces:
        raise ValueError("no request was answered")
    begin, end = min(t.sent for t in traces), max(t.last for t in traces)
    prompts, outputs = sum(t.prompt_tokens for t in traces), sum(t.tokens for t in traces)
    ttfts = [t.ttft for t in traces]
    tpots = [t.tpot for t in traces if t.tpot is not None]
    return Wave(
        requests=len(traces),
        prompt_tokens=round(prompts / len(traces)),
        output_tokens=outputs,
        seconds=end - begin,
        output_rate=outputs / (end - begin),
        decode_rate=_decode_rate(traces),
        prefill_rate=prompts / (max(t.first for t in traces) - begin),
        ttft_median=statistics.median(ttfts),
        ttft_p95=percentile(ttfts, 0.95),
        tpot_median=statistics.median(tpots) if tpots else None,
        tpot_p95=percentile(tpots, 0.95) if tpots else None,
    )


def _decode_rate(traces: Sequence[Trace]) -> float | None:
    begin, end = max(t.first for t in traces), min(t.last for t in traces)
    if end <= begin:
        return None
    return sum(t.tokens_until(end) - t.tokens_until(begin) for t in traces) / (end - begin)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted values lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def middle(waves: Sequence[Wave]) -> Wave:
    """The wave with the median whole-run rate: figures of one real wave, not a mix of several."""
    return sorted(waves, key=lambda wave: wave.output_rate)[(len(waves) - 1) // 2]
