"""Which modules of the model keep their weights as the file has them, and which of its tensors each one holds.

vLLM builds some of a checkpoint's matrices as one module: the parts of such a module keep their own types. A module all
of whose parts are dense stays with vLLM's unquantised method, and so do those that vLLM needs dense: ``kv_b_proj``,
which it splits and absorbs, and all that it builds without a quantisation method.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.glm_dsa.tensor_names import Placement
from glm5deploy.vllm_plugin.slabs import Source

# Matrix -> (the module it is part of, its place there).
_FUSED = {
    "q_a_proj": ("fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_EXPERTS = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}
_DENSE_KINDS = frozenset({"attn_kv_b.weight", "indexer.attn_k.weight", "indexer.proj.weight", "nextn.eh_proj.weight"})
_DENSE_ROLES = frozenset({"norms", "router"})


@dataclass(frozen=True, slots=True)
class Module:
    """A module by the prefix vLLM builds it with, and its parts: the matrices of a linear layer in order of output, or
    gate, up and down of routed experts."""

    prefix: str
    parts: tuple[Source, ...]

    @property
    def experts(self) -> bool:
        return self.parts[0].experts > 1


def quantised_modules(placements: Iterable[Placement], tensors: Mapping[str, ShardTensor]) -> dict[str, Module]:
    """Modules with at least one quantised part, by prefix."""
    found: dict[str, dict[int, Source]] = {}
    for placement in placements:
        for prefix, place, source in _sources(placement, tensors[placement.name]):
            found.setdefault(prefix, {})[place] = source
    modules = (Module(prefix, tuple(parts[i] for i in sorted(parts))) for prefix, parts in found.items())
    return {module.prefix: module for module in modules if not all(part.dense for part in module.parts)}


def _sources(placement: Placement, tensor: ShardTensor) -> Iterable[tuple[str, int, Source]]:
    kind, shape = placement.kind, placement.shape
    if kind.transform in ("experts", "gate_up_experts"):
        prefix, name = placement.hf_name.removesuffix(".weight").split(".{expert}.")
        names = ("gate_proj", "up_proj") if kind.transform == "gate_up_experts" else (name,)
        rows = shape[1] // len(names)
        for i, part in enumerate(names):
            yield prefix, _EXPERTS[part], Source(tensor, placement.hf_name, rows, shape[2], i * rows, shape[1])
    elif (
        kind.transform == "rename"
        and len(shape) == 2
        and kind.gguf not in _DENSE_KINDS
        and kind.role not in _DENSE_ROLES
    ):
        parent, _, leaf = placement.hf_name.removesuffix(".weight").rpartition(".")
        module, place = _FUSED.get(leaf, (leaf, 0))
        # The draft model's head lies in ``shared_head`` but is built with a prefix that leaves this out.
        parent = parent.removesuffix(".shared_head") if leaf == "head" else parent
        yield f"{parent}.{module}".lstrip("."), place, Source(tensor, placement.hf_name, shape[1])


def fingerprint(modules: Mapping[str, Module]) -> str:
    """A digest of all modules' types: compiled graphs hold them as constants."""
    words = (f"{prefix}:{','.join(p.planes_type for p in module.parts)}" for prefix, module in sorted(modules.items()))
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
