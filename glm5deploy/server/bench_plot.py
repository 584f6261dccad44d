"""A benchmark as a picture: tokens per second and time to first token over concurrency, a line a prompt length."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from glm5deploy.errors import UsageError
from glm5deploy.server.bench_record import BenchRecord


def require_matplotlib() -> None:
    """Raise UsageError, with the command that helps, unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint='pip install "glm5deploy[plot]"')


def draw(record: BenchRecord, path: Path, earlier: BenchRecord | None = None) -> None:
    """Write a PNG of the points that were measured; ``earlier`` figures are drawn dashed beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    rates, firsts = figure.subplots(1, 2)
    for number, prompt in enumerate(sorted({point.prompt for point in record.points})):
        for source, style in ((record, "o-"), (earlier, "x--")):
            waves = [(p.concurrency, p.wave) for p in source.points if p.prompt == prompt and p.wave] if source else []
            if not waves:
                continue
            label = f"{prompt} tokens" + (f", {source.when}" if source and source is earlier else "")
            counts = [count for count, _ in waves]
            colour = f"C{number % 10}"
            rates.plot(counts, [w.decode_rate or w.output_rate for _, w in waves], style, color=colour, label=label)
            firsts.plot(counts, [w.ttft_median for _, w in waves], style, color=colour, label=label)
    rates.set_ylabel("generated tokens per second, all requests")
    firsts.set_ylabel("seconds to the first token, median")
    for axes in (rates, firsts):
        axes.set_xlabel("requests at a time")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    if rates.has_data():
        rates.legend(title="prompt")
    figure.suptitle(f"{record.model}, answers of {record.output} tokens, {record.when}")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
