"""Which layers select tokens themselves ("F") and which reuse the selection of the F layer before them ("S").

vLLM reads the schedule from ``index_topk_pattern`` alone, and a wrong one gives fluent, wrong text. It is never read
off the tensor table: published files carry duplicated indexer tensors on S layers. The table serves as a cross-check.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE
from glm5deploy.glm_dsa.hparams import Hparams

OPTION = "--indexer-schedule"
KEY = f"{ARCHITECTURE}.attention.indexer.types"
LONG_CONTEXT = 1_048_576  # GLM-5.2 and later; a shorter context marks GLM-5 and 5.1, which share nothing
_TABLE_LAYERS = 78

Source = Literal["file", "option", "table", "context length"]


@dataclass(frozen=True, slots=True)
class IndexerSchedule:
    """``pattern`` has a letter per hidden layer, F or S; ``source`` says who decided, ``warning`` what to doubt."""

    pattern: str
    source: Source
    warning: str | None = None

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, letter in enumerate(self.pattern) if letter == "F")

    def is_full(self, layer: int) -> bool:
        """Whether block ``layer`` has an indexer in use; MTP blocks, past the hidden layers, always do."""
        return layer >= len(self.pattern) or self.pattern[layer] == "F"


def glm_5_2_pattern(num_layers: int = _TABLE_LAYERS) -> str:
    """GLM-5.2's schedule (frequency 4, offset 3): layers 0, 1, 2, then every fourth are full."""
    return "".join("F" if max(layer - 2, 0) % 4 == 0 else "S" for layer in range(num_layers))


def resolve_schedule(
    hparams: Hparams, tensor_names: Collection[str], *, override: str | None = None
) -> IndexerSchedule:
    """Decide the schedule: the file's key, the user's ``override``, the GLM-5.2 table, all full; else refuse.

    Raises :class:`UsageError` for an override that is malformed or contradicts the file's key, and
    :class:`DeployError` when nothing decides or the tensors contradict the decision.
    """
    present = tuple(
        layer for layer in range(hparams.num_layers) if f"blk.{layer}.indexer.attn_k.weight" in tensor_names
    )
    schedule = _decide(hparams, present, _parse_override(override, hparams.num_layers))
    _require_tensors(schedule, present, hparams.num_layers)
    return schedule


def _parse_override(override: str | None, num_layers: int) -> str | None:
    if override is None:
        return None
    pattern = override.strip().upper()
    wrong = None
    if not pattern or set(pattern) - {"F", "S"}:
        wrong = "may hold the letters F (own indexer) and S (shared) only"
    elif len(pattern) != num_layers:
        wrong = f"has {len(pattern)} letters; the model has {num_layers} layers"
    elif pattern[0] != "F":
        wrong = "must begin with F: the first layer has no earlier selection to share"
    if wrong:
        raise UsageError(
            f"{OPTION} {override[:100]!r} {wrong}", hint=f"Give one letter per layer, as in {OPTION} FSFS."
        )
    return pattern


def _decide(hparams: Hparams, present: tuple[int, ...], override: str | None) -> IndexerSchedule:
    if hparams.indexer_types is not None:
        pattern = "".join("F" if full else "S" for full in hparams.indexer_types)
        if pattern[0] != "F":
            raise FileFormatError(f"metadata key {KEY} marks the first layer as shared; nothing precedes it")
        if override not in (None, pattern):
            raise UsageError(
                f"{OPTION} {override} contradicts the file, whose key {KEY} says {pattern}",
                hint=f"Leave {OPTION} out: the file knows its schedule.",
            )
        return IndexerSchedule(pattern, "file")
    if override is not None:
        return IndexerSchedule(override, "option")
    if hparams.context_length < LONG_CONTEXT:
        return IndexerSchedule("F" * hparams.num_layers, "context length")
    if hparams.num_layers == _TABLE_LAYERS:
        return IndexerSchedule(
            glm_5_2_pattern(),
            "table",
            f"the file does not say which layers share their indexer (no key {KEY}); "
            f"GLM-5.2's published schedule is used: layers 0, 1, 2 and every fourth after are full. "
            f"{OPTION} names another.",
        )
    raise DeployError(
        f"the file does not say which of its {hparams.num_layers} layers share their indexer: it has no key {KEY}, and "
        f"no known model has this shape (context {hparams.context_length}); a wrong guess would answer wrongly",
        hint=_hint(present, hparams.num_layers),
    )


def _hint(present: tuple[int, ...], num_layers: int) -> str:
    hint = f"Name the schedule, one letter per layer, F for an own indexer and S for a shared one: {OPTION} FSFS…"
    if 0 < len(present) < num_layers and present[0] == 0:
        found = "".join("F" if layer in present else "S" for layer in range(num_layers))
        hint += f" (indexer tensors exist on the F layers of {found}; use it only if the model's config.json agrees)"
    return hint


def _require_tensors(schedule: IndexerSchedule, present: tuple[int, ...], num_layers: int) -> None:
    absent = [layer for layer in schedule.full_layers if layer not in present]
    if absent:
        raise DeployError(
            f"the indexer schedule ({schedule.source}) needs an indexer on layers {_some(absent)}, "
            "but the file has no indexer tensors there",
            hint=f"Give the schedule the file was made with: {OPTION} FSFS…, or take a complete file.",
        )
    # All layers: duplicates, which prove nothing. Some: a faithful file, whose tensors are exactly the full layers'.
    extra = [layer for layer in present if not schedule.is_full(layer)]
    if extra and len(present) < num_layers and schedule.source != "file":
        raise DeployError(
            f"the indexer schedule ({schedule.source}) shares layers {_some(extra)}, but the file has an indexer "
            f"there and on {len(present)} of {num_layers} layers in all",
            hint=f"Check the schedule against the model's config.json and give it: {OPTION} FSFS…",
        )


def _some(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:8]))
    return shown if len(layers) <= 8 else f"{shown} and {len(layers) - 8} more"
