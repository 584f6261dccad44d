"""Bytes of weights and cache, from the tensor table: by role, per rank of a parallel layout, and per token.

Numbers for planning, not for allocation: activations, workspaces and CUDA graphs come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.pipeline_parallel import vllm_division
from glm5deploy.glm_dsa.tensor_kinds import Role
from glm5deploy.glm_dsa.tensor_names import Placement, place
from glm5deploy.glm_dsa.weight_types import ALWAYS_DENSE, DENSE_BYTES, SizedTensor, gpu_nbytes

KvDtype = Literal["bfloat16", "fp8_ds_mla"]

_INDEX_BYTES = 4  # an fp32 scale beside each token's fp8 key
# Kept in fp32: rounding the router's bias changes which experts are chosen.
_FLOAT32 = frozenset({"exp_probs_b.bias", "indexer.k_norm.weight", "indexer.k_norm.bias"})


@dataclass(frozen=True, slots=True)
class RoleSize:
    """What one role (attention, experts, …) takes in the file, over ``tensors`` tensors of ``types``."""

    role: Role
    tensors: int
    weights: int
    nbytes: int
    types: Mapping[str, int]  # tensors of each type, the most bytes first

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights


def sizes_by_role(tensors: Iterable[SizedTensor], hparams: Hparams) -> tuple[RoleSize, ...]:
    """The file's bytes by role, largest first; tensors with unknown names count nowhere."""
    roles: dict[Role, list[SizedTensor]] = {}
    for tensor in tensors:
        placement = place(tensor.name, hparams)
        if placement is not None:
            roles.setdefault(placement.kind.role, []).append(tensor)
    sizes = [
        RoleSize(role, len(found), sum(prod(t.shape) for t in found), sum(t.nbytes for t in found), _types(found))
        for role, found in roles.items()
    ]
    return tuple(sorted(sizes, key=lambda size: -size.nbytes))


def _types(tensors: Sequence[SizedTensor]) -> Mapping[str, int]:
    names = {tensor.type.name for tensor in tensors}
    total = {name: sum(t.nbytes for t in tensors if t.type.name == name) for name in names}
    order = sorted(names, key=lambda name: (-total[name], name))
    return {name: sum(t.type.name == name for t in tensors) for name in order}


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """``tp`` ranks share every layer, ``pp`` groups of ranks share the layers; with ``expert_parallel`` the ranks of a
    group hold whole experts. ``partition`` is the layers of each group, by default as vLLM deals them out."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False
    partition: tuple[int, ...] = ()

    def stage_of_layers(self, num_layers: int) -> Sequence[int]:
        """The pipeline stage of every layer."""
        counts = self.partition or vllm_division(num_layers, self.pp)
        return [stage for stage, count in enumerate(counts) for _ in range(count)]


def weight_bytes_per_rank(
    placements: Iterable[Placement],
    tensors: Mapping[str, SizedTensor],
    hparams: Hparams,
    layout: ParallelLayout,
    *,
    dense: bool = False,
) -> tuple[int, ...]:
    """Bytes of weights on one rank of each pipeline stage.

    ``placements`` are the tensors the model uses (:attr:`TensorPlan.used`), ``tensors`` the file's by name. ``dense``:
    every weight is dequantised to 16 bits at load (the CPU engine).
    """
    stages = [0] * layout.pp
    stage_of = layout.stage_of_layers(hparams.num_layers)
    for placement in placements:
        share = _rank_bytes(placement, tensors[placement.name], layout, dense)
        for stage in _stages(placement, hparams, stage_of):
            stages[stage] += share
    return tuple(stages)


def _rank_bytes(placement: Placement, tensor: SizedTensor, layout: ParallelLayout, dense: bool) -> int:
    kind = placement.kind
    weights = prod(tensor.shape)
    if kind.gguf in _FLOAT32:
        nbytes = 4 * weights
    elif dense or kind.gguf in ALWAYS_DENSE or tensor.type.block_elements == 1:
        nbytes = DENSE_BYTES * weights
    else:
        nbytes = gpu_nbytes(tensor)
    if kind.cut == "none":
        return nbytes
    if kind.role == "experts" and layout.expert_parallel:
        experts = placement.shape[2]
        return nbytes // experts * ceil(experts / layout.tp)
    return ceil(nbytes / layout.tp)


def _stages(placement: Placement, hparams: Hparams, stage_of: Sequence[int]) -> Iterator[int]:
    last = stage_of[-1]
    if placement.layer is not None:
        yield stage_of[placement.layer] if placement.layer < hparams.num_layers else last
    elif placement.name == "token_embd.weight":
        yield 0
        if hparams.num_nextn and last != 0:
            yield last  # the MTP block embeds tokens as well
    else:
        yield last


def cache_bytes_per_token(
    hparams: Hparams, schedule: IndexerSchedule, dtype: KvDtype = "bfloat16", *, use_mtp: bool = False
) -> int:
    """Bytes a token takes in the caches of all layers, on every tensor-parallel rank (the latent is not divided).

    A layer keeps one latent row: 16-bit values, or vLLM's ``fp8_ds_mla`` record of fp8 latent, an fp32 scale per 128
    values and a 16-bit RoPE part. Full layers keep an fp8 index key with its scale besides.
    """
    if dtype == "bfloat16":
        row = DENSE_BYTES * hparams.latent_dim
    else:
        row = hparams.kv_lora_rank + 4 * (hparams.kv_lora_rank // 128) + DENSE_BYTES * hparams.qk_rope_head_dim
    drafts = hparams.num_nextn if use_mtp else 0
    index_row = hparams.index_head_dim + _INDEX_BYTES
    return (hparams.num_layers + drafts) * row + (len(schedule.full_layers) + drafts) * index_row
