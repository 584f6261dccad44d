"""A model as its headers describe it, and the ways in which it can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.memory import ParallelLayout
from glm5deploy.glm_dsa.tensor_names import TensorPlan
from glm5deploy.glm_dsa.tensor_parallel import illegal_cuts, indivisible_dimensions
from glm5deploy.glm_dsa.weight_types import SizedTensor


@dataclass(frozen=True)
class ModelTable:
    """A model as its headers describe it: the tensors it uses out of the file's, and how layers share indexers."""

    hparams: Hparams
    schedule: IndexerSchedule
    plan: TensorPlan
    tensors: Mapping[str, SizedTensor]

    @cached_property
    def used(self) -> tuple[SizedTensor, ...]:
        return tuple(self.tensors[placement.name] for placement in self.plan.used)


def obstacles(model: ModelTable, layout: ParallelLayout, *, dense: bool) -> tuple[str, ...]:
    """Why the model cannot be cut so; empty when it can. ``dense``: weights are dequantised before they are cut."""
    reasons = []
    if layout.pp > (full := len(model.schedule.full_layers)):
        reasons.append(
            f"{layout.pp} stages, but only {full} layers with an indexer, and each stage must begin with one"
        )
    uneven = indivisible_dimensions(model.hparams, layout.tp, expert_parallel=layout.expert_parallel)
    if uneven:
        reasons.append(f"{layout.tp} ranks do not divide {', '.join(uneven)}")
    if dense or uneven:
        return tuple(reasons)
    cuts = illegal_cuts(model.used, model.hparams, layout.tp, expert_parallel=layout.expert_parallel)
    for kind, columns, block in sorted({(cut.type, cut.columns, cut.block_elements) for cut in cuts}):
        part = columns / layout.tp
        reasons.append(f"cuts {kind} blocks: {part:g} of {columns} columns a rank, blocks of {block}")
    return tuple(reasons)


def candidate_layouts(gpus: int) -> tuple[ParallelLayout, ...]:
    """Every division of exactly ``gpus`` GPUs, most tensor-parallel first; expert parallelism where ranks share."""
    sizes = [tp for tp in range(gpus, 0, -1) if gpus % tp == 0]
    return tuple(
        ParallelLayout(tp, gpus // tp, expert_parallel)
        for tp in sizes
        for expert_parallel in ((False, True) if tp > 1 else (False,))
    )
