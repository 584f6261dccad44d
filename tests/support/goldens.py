"""The reference sets: their files, prompts and expected results (`tests/data/tiny-glm5/README.md` describes them)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.data import SET_A, tiny_glm5

RUN = "topk64/fp8"
PROMPTS = ("p5", "p63", "p65", "p130", "p300", "p700")


@dataclass(frozen=True)
class ReferenceSet:
    """``gguf`` is a folder of shards or a file, below the data folder; ``schedule`` is given where the file is mute."""

    name: str
    gguf: str
    golden: str
    schedule: str
    schedule_option: str | None = None

    @property
    def root(self) -> Path:
        return SET_A if self.name == "A-UD-Q4_K_XL" else tiny_glm5()

    @property
    def path(self) -> Path:
        return self.root / self.gguf


SETS = {
    "A": ReferenceSet("A-UD-Q4_K_XL", "GLM-tiny-A-GGUF/UD-Q4_K_XL", "A-UD-Q4_K_XL.json", "FFFF"),
    "B-Q4": ReferenceSet("B-Q4_K_M", "GLM-tiny-B-GGUF/Q4_K_M", "B-Q4_K_M.FSFS.json", "FSFS", "FSFS"),
    "B-Q8": ReferenceSet("B-Q8_0", "GLM-tiny-B-GGUF/GLM-tiny-B-Q8_0.gguf", "B-Q8_0.json", "FSFS"),
}


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    positions: list[int]
    selected_positions: list[int]


@dataclass(frozen=True)
class Reference:
    """``top``: position -> 20 (id, logprob) for the token after it; ``selected``: (layer, position) -> positions."""

    top: dict[int, list[tuple[int, float]]]
    selected: dict[tuple[int, int], frozenset[int]]
    greedy: list[int]
    margins: list[float]


@cache
def prompts() -> dict[str, Prompt]:
    raw = json.loads((SET_A / "goldens" / "prompts.json").read_text())
    return {name: Prompt(p["ids"], p["positions"], p["selected_positions"]) for name, p in raw.items()}


@cache
def references(key: str, run: str = RUN) -> dict[str, Reference]:
    """Expected results of every prompt for the set ``key``."""
    chosen = SETS[key]
    results = json.loads((chosen.root / "goldens" / chosen.golden).read_text())["results"][run]
    return {name: _reference(results[name]) for name in PROMPTS}


def _reference(raw: dict[str, Any]) -> Reference:
    return Reference(
        top={int(position): [(int(i), float(v)) for i, v in top] for position, top in raw["top"].items()},
        selected={
            (int(layer), int(position)): frozenset(chosen)
            for layer, rows in raw.get("selected", {}).items()
            for position, chosen in rows.items()
        },
        greedy=raw["greedy"]["ids"],
        margins=raw["greedy"]["margin"],
    )
