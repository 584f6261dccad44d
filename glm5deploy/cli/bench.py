"""``bench``: what a running server does, at several concurrencies and prompt lengths."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5deploy import __version__
from glm5deploy.cli.options import DEFAULT_WORKDIR, ConfigOpt, JsonOpt, WorkdirOpt
from glm5deploy.cli.server_choice import KeyFileOpt, ModelNameOpt, UrlOpt, choose_server
from glm5deploy.cli.session import Session
from glm5deploy.errors import UsageError

if TYPE_CHECKING:
    from glm5deploy.server.bench import Point
    from glm5deploy.server.bench_record import BenchRecord

_MULTIPLES = {"": 1, "k": 1024}


def bench(
    concurrency: Annotated[
        str, typer.Option("--concurrency", metavar="LIST", help="Requests at a time.")
    ] = "1,4,16,32,64",
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="LIST", help="Prompt lengths in tokens; k is 1,024.")
    ] = "1k,8k,32k",
    output: Annotated[int, typer.Option("--output", min=2, help="Tokens of each answer.")] = 256,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Waves a point; the middle one counts.")] = 1,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the figures as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the figures as PNG (extra: plot).")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FILE", help="Earlier figures to compare with, as from a start without MTP."),
    ] = None,
    url: UrlOpt = None,
    model: ModelNameOpt = None,
    api_key_file: KeyFileOpt = None,
    workdir: WorkdirOpt = DEFAULT_WORKDIR,
    config: ConfigOpt = None,
    json_mode: JsonOpt = False,
) -> None:
    """Measure a running server: time to first token, time per token, tokens per second."""
    flags = {"serve.api_key_file": api_key_file}
    session = Session.open(workdir=workdir, config=config, json_mode=json_mode, flags=flags)
    counts, lengths = parse_counts(concurrency, "--concurrency"), parse_counts(prompt, "--prompt")
    from glm5deploy.server.bench import Bench, BenchSettings
    from glm5deploy.server.bench_plot import draw, require_matplotlib
    from glm5deploy.server.bench_record import BenchRecord, compare_rates, read_record
    from glm5deploy.server.bench_request import BenchTarget

    for file in (save, plot):
        if file is not None:
            require_writable(file)
    if plot is not None:
        require_matplotlib()
    earlier = read_record(compare) if compare is not None else None
    server = choose_server(session, url, model)
    settings = BenchSettings(counts, lengths, output, repeat)
    points: list[Point] = []
    with Bench(BenchTarget(server.url, server.model, server.key), settings) as measured:
        for point in measured.run(session.output.note):
            points.append(point)
            session.output.note(_line(point))
    record = BenchRecord(
        model=server.model,
        version=__version__,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        output=output,
        points=tuple(points),
    )
    if save is not None:
        _write(save, json.dumps(record.as_json(), indent=1) + "\n")
    if plot is not None:
        draw(record, plot, earlier)
    if session.output.json_mode:
        session.output.result(record.as_json() | ({"faster": compare_rates(record, earlier)} if earlier else {}))
        return
    shown: dict[str, object] = {"model": server.model, "points": _rows(record)}
    if earlier is not None:
        shown[f"compared with {earlier.when}"] = compare_rates(record, earlier)
    session.output.result(shown)


def parse_counts(text: str, option: str) -> tuple[int, ...]:
    """``1,4,16`` or ``1k,8k`` as numbers; raises UsageError."""
    counts = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,7})(k?)", word.strip().lower())
        if match is None or int(match[1]) < 1:
            raise UsageError(f"{option} {text!r}: expected positive numbers with commas between", hint=f"{option} 1,8")
        counts.append(int(match[1]) * _MULTIPLES[match[2]])
    return tuple(sorted(set(counts)))


def require_writable(file: Path) -> None:
    """Raise UsageError now rather than after minutes of measuring."""
    folder = file.expanduser().absolute().parent
    if file.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write {file}", hint="name a file in a folder that exists and may be written")


def _line(point: Point) -> str:
    head = f"{point.concurrency} × {point.prompt}: "
    if point.wave is None:
        return head + point.note
    rate = point.wave.decode_rate or point.wave.output_rate
    return head + f"{rate:.1f} tok/s, first token after {point.wave.ttft_median:.2f} s"


def _rows(record: BenchRecord) -> list[dict[str, object]]:
    """The table's rows, all with the same columns."""
    drafted = any(point.accepted is not None for point in record.points)
    rows: list[dict[str, object]] = []
    for point in record.points:
        wave = asdict(point.wave) if point.wave else {}
        row: dict[str, object] = {
            "prompt": point.prompt,
            "c": point.concurrency,
            "decode_tok/s": _figure(wave.get("decode_rate")),
            "overall_tok/s": _figure(wave.get("output_rate")),
            "prefill_tok/s": _figure(wave.get("prefill_rate")),
            "TTFT_ms": _figure(wave.get("ttft_median"), 1000),
            "TTFT_p95_ms": _figure(wave.get("ttft_p95"), 1000),
            "TPOT_ms": _figure(wave.get("tpot_median"), 1000),
            "TPOT_p95_ms": _figure(wave.get("tpot_p95"), 1000),
        }
        if drafted:
            row["drafts_accepted"] = None if point.accepted is None else f"{point.accepted:.0%}"
        rows.append(row | {"note": point.note})
    return rows


def _figure(value: float | None, scale: float = 1) -> str | None:
    return None if value is None else f"{value * scale:.1f}" if value * scale < 1000 else f"{value * scale:.0f}"


def _write(path: Path, text: str) -> None:
    from glm5deploy.files import write_atomically

    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
