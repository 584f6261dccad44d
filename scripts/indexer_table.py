"""The indexer's figures beside their goals, in two tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from aligned_table import aligned

Figures = Mapping[str, float | str]
LIKE = ", score-like"  # of the figures on rows that are as index scores are
DECODE_GOAL, PREFILL_GOAL, TOPK_GOAL = 1.3, 2.0, 1.0


def word(figures: Figures, name: str) -> str:
    value = figures.get(name, "")
    return f"{value:.1f}" if isinstance(value, float) else "failed" if value else "absent"


def compared(figures: Figures, mine: str, theirs: str, goal: float) -> list[str]:
    """Ours, theirs, the ratio, and whether the goal is met; what is missing is not met."""
    a, b = figures.get(mine), figures.get(theirs)
    both = [word(figures, mine), word(figures, theirs)]
    if not (isinstance(a, float) and isinstance(b, float)):
        return [*both, "", "not measured"]
    return [*both, f"{a / b:.2f}", "met" if a <= goal * b else "MISSED"]


def verdicts(results: Sequence[Figures]) -> list[str]:
    """Decode, then prefill. vLLM itself takes cooperative_topk for rows as few as these while decoding."""
    decode = [figures for figures in results if "B" in figures]
    prefill = [figures for figures in results if "T" in figures]
    lines: list[str] = []
    kinds = (
        ("decode, B x context", "B", decode, DECODE_GOAL, "cooperative_topk"),
        ("prefill, T x context", "T", prefill, PREFILL_GOAL, "top_k_per_row"),
    )
    for title, rows, chosen, goal, operation in kinds:
        head = [title, "scores", "DeepGEMM", "ratio", f"goal {goal}"]
        head += ["top-k", operation, "ratio", "goal 1.0", "score-like", "theirs", "ratio", "goal 1.0"]
        table = [head]
        for figures in chosen:
            scores = compared(figures, "ours", "DeepGEMM", goal)
            noise = compared(figures, "topk", operation, TOPK_GOAL)
            like = compared(figures, "topk" + LIKE, operation + LIKE, TOPK_GOAL)
            table.append([f"{figures[rows]} x {figures['context']}", *scores, *noise, *like])
        lines += aligned(table)
    return lines
