"""Bytes of weights and cache, from the tensor table: by role, per rank of a parallel layout, and per token.

Numbers for planning, not for allocation: activations, workspaces and CUDA graphs come on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, Protocol

from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.indexer_schedule import IndexerSchedule
from glm5deploy.glm_dsa.pipeline_parallel import vllm_division
from glm5deploy.glm_dsa.tensor_kinds import Role
from glm5deploy.glm_dsa.tensor_names import Placement, place
from glm5deploy.glm_dsa.tensor_parallel import TypedTensor

KvDtype = Literal["bfloat16", "fp8_ds_mla"]

_DENSE_BYTES = 2  # bfloat16, the model's dtype
_INDEX_BYTES = 4  # an fp32 scale beside each token's fp8 key
# Tensors that vLLM keeps dense whatever the file holds: kv_b is split and absorbed, the others are plain layers there.
_ALWAYS_DENSE = frozenset(
    {
        "attn_k_b.weight",
        "attn_v_b.weight",
        "attn_kv_b.weight",
        "indexer.attn_k.weight",
        "indexer.proj.weight",
        "ffn_gate_inp.weight",
        "nextn.eh_proj.weight",
    }
)
# Kept in fp32: rounding the router's bias changes which experts are chosen.
_FLOAT32 = frozenset({"exp_probs_b.bias", "indexer.k_norm.weight", "indexer.k_norm.bias"})

# Bytes of 256 weights on a GPU, for types that take more there than in the file: codebook indices become signs and
# magnitudes, and what no kernel reads becomes 16 bits. quants/formats.py decides; a test holds the two together.
BYTES_ON_GPU = {
    "IQ2_XXS": 102,
    "IQ2_XS": 106,
    "IQ2_S": 106,
    "IQ3_XXS": 134,
    "IQ3_S": 134,
    "IQ1_S": 512,
    "IQ1_M": 512,
    "TQ1_0": 512,
    "TQ2_0": 512,
    "NVFP4": 512,
}


class SizedTensor(TypedTensor, Protocol):
    """A tensor with its bytes in the file."""

    @property
    def nbytes(self) -> int: ...


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
    elif dense or kind.gguf in _ALWAYS_DENSE or tensor.type.block_elements == 1:
        nbytes = _DENSE_BYTES * weights
    else:
        nbytes = gpu_nbytes(tensor)
    if kind.cut == "none":
        return nbytes
    if kind.role == "experts" and layout.expert_parallel:
        experts = placement.shape[2]
        return nbytes // experts * ceil(experts / layout.tp)
    return ceil(nbytes / layout.tp)


def gpu_nbytes(tensor: SizedTensor) -> int:
    """Bytes that a tensor's weights take on a GPU when they stay quantised."""
    per_256 = BYTES_ON_GPU.get(tensor.type.name)
    return tensor.nbytes if per_256 is None else prod(tensor.shape) * per_256 // 256


def growth_on_gpu(tensors: Iterable[SizedTensor]) -> dict[str, float]:
    """Types that take more memory on a GPU than in the file, and how many times as much."""
    return {
        tensor.type.name: round(gpu_nbytes(tensor) / tensor.nbytes, 3)
        for tensor in tensors
        if tensor.type.name in BYTES_ON_GPU
    }


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
        row = _DENSE_BYTES * hparams.latent_dim
    else:
        row = hparams.kv_lora_rank + 4 * (hparams.kv_lora_rank // 128) + _DENSE_BYTES * hparams.qk_rope_head_dim
    drafts = hparams.num_nextn if use_mtp else 0
    index_row = hparams.index_head_dim + _INDEX_BYTES
    return (hparams.num_layers + drafts) * row + (len(schedule.full_layers) + drafts) * index_row
