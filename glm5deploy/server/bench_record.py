"""A benchmark's figures as they are saved, read back and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.server.bench import Point
from glm5deploy.server.bench_figures import Wave

_VERSION = 1
_LARGEST = 16 << 20


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """``when`` is UTC in ISO form, ``output`` the tokens of each answer, ``version`` the program's."""

    model: str
    version: str
    when: str
    output: int
    points: tuple[Point, ...]

    def as_json(self) -> dict[str, object]:
        return {"bench": _VERSION, **asdict(self)}


def read_record(path: Path) -> BenchRecord:
    """A saved record; raises UsageError when it cannot be read, FileFormatError when it is something else."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(_LARGEST))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise FileFormatError(f"{path} is not JSON", hint="give a file that `bench --save` wrote") from None
    try:
        if value["bench"] != _VERSION:
            raise ValueError("version")
        return BenchRecord(
            model=str(value["model"]),
            version=str(value["version"]),
            when=str(value["when"]),
            output=int(value["output"]),
            points=tuple(_point(point) for point in value["points"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        hint = "give a file that `bench --save` wrote"
        raise FileFormatError(f"{path} is no saved benchmark: {error}", hint=hint) from None


def _point(value: Mapping[str, Any]) -> Point:
    wave = value["wave"]
    figures = None
    if wave is not None:
        figures = Wave(**{field.name: wave[field.name] for field in fields(Wave)})
        if not all(number is None or isinstance(number, int | float) for number in asdict(figures).values()):
            raise ValueError("a figure that is no number")
    return Point(int(value["concurrency"]), int(value["prompt"]), figures, value["accepted"], str(value["note"]))


def compare_rates(now: BenchRecord, before: BenchRecord) -> list[dict[str, object]]:
    """For every point that both have: tokens per second then and now (decoding, where both could tell), and the ratio.

    Raises UsageError when they have no point in common or differ in the answers' length.
    """
    if now.output != before.output:
        raise UsageError(
            f"the earlier figures are of answers of {before.output} tokens, these of {now.output}",
            hint=f"measure with --output {before.output}",
        )
    earlier = {(p.prompt, p.concurrency): p.wave for p in before.points if p.wave}
    rows: list[dict[str, object]] = []
    for point in now.points:
        then = earlier.get((point.prompt, point.concurrency))
        if point.wave is None or then is None:
            continue
        old, new = then.decode_rate, point.wave.decode_rate
        if old is None or new is None:
            old, new = then.output_rate, point.wave.output_rate
        rows.append(
            {
                "prompt": point.prompt,
                "c": point.concurrency,
                "tok/s_then": round(old, 1),
                "tok/s_now": round(new, 1),
                "ratio": round(new / old, 3),
            }
        )
    if not rows:
        raise UsageError("the earlier figures have no concurrency and prompt length in common with these")
    return rows
