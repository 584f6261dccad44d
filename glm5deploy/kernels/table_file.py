"""Measured launch parameters in a file, written whole, for one kind of GPU, one Triton and one state of the code."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import triton

from glm5deploy.kernels.tuning import Gpu, LogitsConfig, SparseConfig, SparseRow

VERSION = 2
_LARGEST = 1 << 20
_Config = TypeVar("_Config", SparseConfig, LogitsConfig)
# Files of this package whose changes leave every kernel and every launch as they are.
_APART = {
    "__init__",
    "compile_counter",
    "measure",
    "prepare",
    "reference",
    "table_file",
    "tune",
    "tune_cases",
    "tune_run",
    "warmup",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """What a file holds for a GPU: ``request`` is what was measured for, ``refused`` why nothing of it is used."""

    rows: tuple[SparseRow, ...] = ()
    ragged: LogitsConfig | None = None
    paged: LogitsConfig | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False
    refused: str = ""


def made_for(of: Gpu) -> dict[str, str | int]:
    """What launch parameters hold for: another value of any of these may make others faster, or these not fit."""
    return {**asdict(of), "triton": str(triton.__version__), "kernels": code_digest()}


@functools.cache
def code_digest() -> str:
    """A digest of the sources that kernels and their launches come from."""
    sources = sorted(path for path in Path(__file__).parent.glob("*.py") if path.stem not in _APART)
    return hashlib.sha256(b"\0".join(path.name.encode() + path.read_bytes() for path in sources)).hexdigest()[:16]


def save_table(path: Path, of: Gpu, measured: Measured) -> None:
    """Write ``measured`` for one kind of GPU; an interruption leaves the old file."""
    content = {
        "version": VERSION,
        "made_for": made_for(of),
        "request": dict(measured.request),
        "complete": measured.complete,
        "rows": [asdict(row) for row in measured.rows],
        "ragged": asdict(measured.ragged) if measured.ragged else None,
        "paged": asdict(measured.paged) if measured.paged else None,
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def load_table(path: Path, of: Gpu) -> Measured:
    """What the file holds for this GPU; nothing, with the reason, when it is missing or was made for something else.

    Raises ValueError when the file is there and is no such table: serving with other parameters than the operator
    measured would go unnoticed.
    """
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_LARGEST))
        if content["version"] != VERSION:
            return Measured(refused=f"it has version {content['version']}, this release writes {VERSION}")
        found = content["made_for"]
        differ = [
            f"{name} {found.get(name)}, here {here}" for name, here in made_for(of).items() if found.get(name) != here
        ]
        if differ:
            return Measured(refused=f"it was measured with {'; '.join(differ)}")
        return Measured(
            tuple(_row(entry) for entry in content["rows"]),
            _config(LogitsConfig, content["ragged"]) if content["ragged"] else None,
            _config(LogitsConfig, content["paged"]) if content["paged"] else None,
            dict(content["request"]),
            _truth(content["complete"]),
        )
    except FileNotFoundError:
        return Measured(refused="there is no such file")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no kernel table ({error!r}): delete it or measure again") from error


def _config(kind: type[_Config], entry: Any) -> _Config:
    names = {f.name for f in fields(kind)}
    if not isinstance(entry, dict) or set(entry) != names or not all(type(value) is int for value in entry.values()):
        raise ValueError(f"a configuration must have the integers {sorted(names)}")
    return kind(**entry)


def _truth(value: Any) -> bool:
    """A bool; of a text "false" or a 0 one cannot tell what was meant."""
    if type(value) is not bool:
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _row(entry: Any) -> SparseRow:
    families, heads, tokens, spills = (entry[name] for name in ("families", "max_heads", "max_tokens", "spill_limit"))
    texts = isinstance(families, list) and all(isinstance(family, str) for family in families)
    if not texts or not all(type(number) is int for number in (heads, tokens, spills)):
        raise ValueError("a row needs families, max_heads, max_tokens and spill_limit")
    return SparseRow(
        tuple(families), _truth(entry["packed"]), heads, tokens, _config(SparseConfig, entry["config"]), spills
    )
