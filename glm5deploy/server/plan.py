"""Whether a model fits on so many GPUs, how it may be cut, and what is left for the cache: arithmetic on headers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from glm5deploy.glm_dsa.memory import KvDtype, ParallelLayout, cache_bytes_per_token, weight_bytes_per_rank
from glm5deploy.glm_dsa.pipeline_parallel import stage_layers
from glm5deploy.glm_dsa.tensor_kinds import Role
from glm5deploy.server.model_table import ModelTable, obstacles
from glm5deploy.server.workspace import Workspace, batch_defaults, workspace

GPUS_OF_A_MACHINE = 8  # more stand in several machines, with a network between
VLLM_MEMORY_SHARE = 0.92  # vLLM's default for --gpu-memory-utilization


class Device(Protocol):
    """What planning needs of a GPU; ``bandwidth`` in bytes per second, None when unknown."""

    @property
    def name(self) -> str: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def cc(self) -> str: ...
    @property
    def bandwidth(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Wishes:
    """``memory_share`` is the part of a GPU that vLLM may use; ``batch_tokens`` and ``max_seqs`` 0: vLLM's defaults."""

    kv_dtype: KvDtype = "bfloat16"
    use_mtp: bool = False
    dense: bool = False
    memory_share: float = VLLM_MEMORY_SHARE
    max_seqs: int = 0
    batch_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StageBudget:
    """Bytes on each GPU of one pipeline stage. ``free`` is what is left for the cache, negative when it does not fit;
    ``token_bytes`` is what a token takes there."""

    layers: int
    weights: int
    workspace: Workspace
    usable: int
    token_bytes: int

    @property
    def free(self) -> int:
        return self.usable - self.weights - self.workspace.total

    @property
    def tokens(self) -> int:
        return max(0, self.free) // self.token_bytes


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One way to use the GPUs. ``obstacles`` say why the model cannot be cut so; then there are no ``stages``."""

    layout: ParallelLayout
    obstacles: tuple[str, ...]
    stages: tuple[StageBudget, ...]

    @property
    def gpus(self) -> int:
        return self.layout.tp * self.layout.pp

    @property
    def fits(self) -> bool:
        return bool(self.stages) and all(stage.free > 0 for stage in self.stages)

    @property
    def tokens(self) -> int:
        """Tokens the cache holds: every stage needs room for each of them."""
        return min((stage.tokens for stage in self.stages), default=0)

    @property
    def fullest(self) -> StageBudget:
        """The stage that limits the cache."""
        return min(self.stages, key=lambda stage: stage.tokens if stage.free > 0 else stage.free)


def plan_layout(model: ModelTable, device: Device, layout: ParallelLayout, wishes: Wishes) -> LayoutPlan:
    """Judge one layout: legal cuts first, then bytes."""
    reasons = obstacles(model, layout, dense=wishes.dense)
    if reasons:
        return LayoutPlan(layout, reasons, ())
    hparams = model.hparams
    layout = replace(layout, partition=stage_layers(model.schedule.pattern, layout.pp))
    weights = weight_bytes_per_rank(model.plan.used, model.tensors, hparams, layout, dense=wishes.dense)
    tokens, seqs = batch_defaults(device.memory_bytes, device.cc, device.name)
    space = workspace(hparams, layout, wishes.batch_tokens or tokens, wishes.max_seqs or seqs)
    usable = int(device.memory_bytes * wishes.memory_share)
    stage_of = layout.stage_of_layers(hparams.num_layers)
    budgets = tuple(
        StageBudget(
            layers=stage_of.count(stage),
            weights=weights[stage],
            workspace=space,
            usable=usable,
            token_bytes=_token_bytes(model, stage, stage_of, wishes),
        )
        for stage in range(layout.pp)
    )
    return LayoutPlan(layout, (), budgets)


def _token_bytes(model: ModelTable, stage: int, stage_of: Sequence[int], wishes: Wishes) -> int:
    """Cache bytes of a token in one stage's layers: those of a model that had only these."""
    pattern = "".join(letter for letter, of in zip(model.schedule.pattern, stage_of, strict=True) if of == stage)
    part = replace(model.hparams, num_layers=len(pattern))
    schedule = replace(model.schedule, pattern=pattern)
    drafts = wishes.use_mtp and stage == stage_of[-1]
    return cache_bytes_per_token(part, schedule, wishes.kv_dtype, use_mtp=drafts)


def best_layout(plans: Sequence[LayoutPlan], context: int) -> LayoutPlan | None:
    """The layout to recommend: one that fits with room for ``context`` tokens if any has, tensor-parallel ranks on one
    machine, with the fewest stages (each adds its time to every token), experts cut rather than dealt out (no rank
    waits for a popular expert). None when nothing fits.
    """
    fitting = [plan for plan in plans if plan.fits]
    return min(
        fitting,
        key=lambda plan: (
            plan.tokens < context,
            plan.layout.tp > GPUS_OF_A_MACHINE,
            plan.layout.pp,
            plan.layout.expert_parallel,
        ),
        default=None,
    )


def role_bytes(model: ModelTable, layout: ParallelLayout, stage: int, *, dense: bool) -> Mapping[Role, int]:
    """Weight bytes by role on each GPU of a stage."""
    roles = dict.fromkeys(placement.kind.role for placement in model.plan.used)
    return {
        role: weight_bytes_per_rank(
            [placement for placement in model.plan.used if placement.kind.role == role],
            model.tensors,
            model.hparams,
            layout,
            dense=dense,
        )[stage]
        for role in roles
    }


def decode_limit(model: ModelTable, device: Device, layout: ParallelLayout) -> float | None:
    """Tokens per second of one sequence if reading weights were all there is to do: an upper bound, never reached.

    Every rank reads all its weights, of routed experts the share that a token uses; stages work one after the other.
    None when the device's bandwidth is unknown. The embedding is looked up, not read whole.
    """
    if device.bandwidth is None:
        return None
    h, nbytes = model.hparams, 0.0
    for placement, tensor in zip(model.plan.used, model.used, strict=True):
        if placement.name == "token_embd.weight" or (placement.layer or 0) >= h.num_layers:
            continue
        share = h.num_experts_used / h.num_experts if placement.kind.role == "experts" else 1.0
        nbytes += tensor.nbytes * share / (1 if placement.kind.cut == "none" else layout.tp)
    return device.bandwidth / nbytes
