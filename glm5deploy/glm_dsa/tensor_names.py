"""From the GGUF tensor table to what a loader feeds vLLM: every tensor is placed, dropped for a reason, or an error.

``plan_tensors`` is the one door: it checks names and shapes of the whole table before a byte is read, so that a
missing, unknown or misshapen tensor is one clear error and never a silently random parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.glm_dsa import tensor_kinds as kinds
from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.name_ranges import collapse
from glm5deploy.glm_dsa.tensor_kinds import TensorKind

_MOST_SHAPES = 20  # wrong shapes spelled out in one message
_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,3})\.(.+)", re.ASCII)


class NamedShape(Protocol):
    """What this module needs of a tensor: its GGUF name and shape (ne order)."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one GGUF tensor goes.

    ``layer`` is the block, None for globals. ``hf_name`` is the full name; of expert stacks it holds ``{expert}``
    (see :meth:`expert_name`), of both halves of kv_b it is the name of the whole. ``kind.transform`` says what turns
    the stored data into HF data, ``shape`` is the canonical GGUF shape (halves of kv_b stored flat are reshaped).
    """

    name: str
    layer: int | None
    hf_name: str
    kind: TensorKind
    shape: tuple[int, ...]

    def expert_name(self, expert: int) -> str:
        """HF name of expert ``expert``'s matrix, slice ``expert`` of the slowest dimension."""
        return self.hf_name.format(expert=expert)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor of the file that the model does not want, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """``used`` keeps the file's order; ``tied_embeddings``: no output matrix exists, the embedding serves as one."""

    used: tuple[Placement, ...]
    dropped: tuple[Dropped, ...]
    tied_embeddings: bool


def place(name: str, hparams: Hparams) -> Placement | None:
    """The placement of a GGUF name by the table alone, whether or not the model needs it; None for unknown names."""
    kind: TensorKind | None
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        kind = kinds.GLOBAL_BY_NAME.get(name)
        return Placement(name, None, kind.hf, kind, kind.shape(hparams)) if kind else None
    layer, rest = int(match[1]), match[2]
    kind = kinds.BLOCK_BY_NAME.get(rest)
    if kind is None or layer >= hparams.num_blocks:
        return None
    return Placement(name, layer, f"model.layers.{layer}.{kind.hf}", kind, kind.shape(hparams))


def required_names(hparams: Hparams, schedule: IndexerSchedule, *, use_mtp: bool) -> Iterator[tuple[str, ...]]:
    """Every tensor the model needs, as the names any one group of which will do: ``a`` or ``a+b``, canonical first."""
    yield ("token_embd.weight",)
    yield ("output_norm.weight",)
    for layer in range(hparams.num_blocks if use_mtp else hparams.num_layers):
        for kind in _block_kinds(hparams, schedule, layer):
            yield (f"blk.{layer}.{kind.gguf}",)
        for parts, whole in kinds.ALTERNATIVES:
            if whole.role != "experts" or layer >= hparams.num_dense_layers:
                yield "+".join(f"blk.{layer}.{part.gguf}" for part in parts), f"blk.{layer}.{whole.gguf}"


def _block_kinds(hparams: Hparams, schedule: IndexerSchedule, layer: int) -> Iterator[TensorKind]:
    yield from kinds.ATTENTION
    if schedule.is_full(layer):
        yield from kinds.INDEXER
    if layer < hparams.num_dense_layers:
        yield from kinds.DENSE_MLP
    else:
        yield from (*kinds.ROUTER, kinds.EXPERT_DOWN, *kinds.SHARED_EXPERTS)
    if layer >= hparams.num_layers:
        yield from kinds.MTP


def plan_tensors(
    tensors: Iterable[NamedShape], hparams: Hparams, schedule: IndexerSchedule, *, use_mtp: bool
) -> TensorPlan:
    """Place every tensor of the file's whole table.

    ``use_mtp`` keeps the MTP blocks (speculative decoding); else their tensors are dropped. Raises
    :class:`FileFormatError` naming every missing and unmapped tensor and the misshapen ones, :class:`UsageError` when
    MTP is wanted of a file that has none.
    """
    if use_mtp and hparams.num_nextn == 0:
        raise UsageError(
            "speculative decoding (MTP) is asked for, but the file has no MTP block",
            hint="Serve without it, or take a file converted with its MTP block.",
        )
    table = {tensor.name: tensor for tensor in tensors}
    unneeded = {name: reason for name in table if (reason := _reason_to_drop(name, table, hparams, schedule, use_mtp))}
    used: list[Placement] = []
    unmapped: list[str] = []
    misshapen: list[str] = []
    for name, tensor in table.items():
        if name in unneeded:
            continue
        placement = place(name, hparams)
        if placement is None or not _belongs(placement, hparams):
            unmapped.append(name)
        elif not _shape_fits(tensor.shape, placement):
            misshapen.append(f"{name} has shape {list(tensor.shape)}, expected {list(placement.shape)}")
        else:
            used.append(placement)
    missing = [
        group[0].replace("+", " and ")
        for group in required_names(hparams, schedule, use_mtp=use_mtp)
        if not any(all(part in table for part in names.split("+")) for names in group)
    ]
    _raise_findings(missing, unmapped, misshapen)
    dropped = tuple(Dropped(name, reason) for name, reason in unneeded.items())
    return TensorPlan(tuple(used), dropped, tied_embeddings="output.weight" not in table)


def _reason_to_drop(
    name: str, table: dict[str, NamedShape], hparams: Hparams, schedule: IndexerSchedule, use_mtp: bool
) -> str | None:
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return None
    layer, rest = int(match[1]), match[2]
    kind = kinds.BLOCK_BY_NAME.get(rest)
    if kind is None or layer >= hparams.num_blocks:
        return None
    if layer >= hparams.num_layers and not use_mtp:
        return "the MTP block is not in use"
    if kind.role == "indexer" and not schedule.is_full(layer):
        return "the layer shares the selection of an earlier one"
    for parts, whole in kinds.ALTERNATIVES:
        if kind is not whole and kind not in parts:
            continue
        complete = all(f"blk.{layer}.{part.gguf}" in table for part in parts)
        if kind is whole and complete:
            return "its parts are used"
        if kind is not whole and not complete and f"blk.{layer}.{whole.gguf}" in table:
            return f"the whole {whole.gguf} is used"
    return None


def _belongs(placement: Placement, hparams: Hparams) -> bool:
    """Whether the block may have this kind at all: dense or routed MLP, MTP extras in MTP blocks only."""
    if placement.layer is None:
        return True
    if placement.kind in kinds.MTP or placement.kind in kinds.MTP_OPTIONAL:
        return placement.layer >= hparams.num_layers
    if placement.kind.role == "dense mlp":
        return placement.layer < hparams.num_dense_layers
    if placement.kind.role in ("router", "experts", "shared experts"):
        return placement.layer >= hparams.num_dense_layers
    return True


def _shape_fits(shape: Sequence[int], placement: Placement) -> bool:
    actual, expected = _without_ones(shape), _without_ones(placement.shape)
    if placement.kind in kinds.KV_B_SPLIT and len(actual) == 2:
        # Some converters flatten heads into rows; the bytes are the same.
        expected = (expected[0], placement.shape[1] * placement.shape[2])
    return actual == expected


def _without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without trailing dimensions of 1, which writers keep or leave out."""
    end = len(shape)
    while end > 1 and shape[end - 1] == 1:
        end -= 1
    return tuple(shape[:end])


def _raise_findings(missing: list[str], unmapped: list[str], misshapen: list[str]) -> None:
    findings = []
    if missing:
        findings.append(f"{len(missing)} missing: {collapse(missing)}")
    if unmapped:
        findings.append(f"{len(unmapped)} unknown to this architecture: {collapse(unmapped)}")
    if misshapen:
        more = f" and {len(misshapen) - _MOST_SHAPES} more" if len(misshapen) > _MOST_SHAPES else ""
        findings.append(f"{len(misshapen)} of another shape: {'; '.join(misshapen[:_MOST_SHAPES])}{more}")
    if not findings:
        return
    hint = "Take a complete file; an interrupted conversion or a shard left out gives such a table."
    if any(name.endswith((".scale", ".input_scale")) for name in unmapped):
        hint = "NVFP4 conversions with separate scale tensors are not supported; choose another quantisation."
    raise FileFormatError("tensors do not make up the model: " + ". ".join(findings), hint=hint)
