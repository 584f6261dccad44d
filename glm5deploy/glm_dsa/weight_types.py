"""What weights of each type take and become on a GPU, and which types are refused. Knowledge of names and sizes alone.

Most types are multiplied as the file has them. Codebook indices of 2- and 3-bit types become signs and magnitudes, the
same values in more bits; a type that no kernel reads, and what vLLM needs dense, is dequantised to 16 bits at load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.name_ranges import collapse
from glm5deploy.glm_dsa.tensor_parallel import TypedTensor

Way = Literal["as in the file", "signs and magnitudes", "16 bits, no kernel reads the type", "16 bits, vLLM needs it"]

DENSE_BYTES = 2  # bfloat16, the model's dtype
# Tensors that vLLM keeps dense whatever the file holds: kv_b is split and absorbed, the others are plain layers there.
ALWAYS_DENSE = frozenset(
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
# Bytes of 256 weights on a GPU. quants/formats.py decides; a test holds the two together.
_CODEBOOKS = {"IQ2_XXS": 102, "IQ2_XS": 106, "IQ2_S": 106, "IQ3_XXS": 134, "IQ3_S": 134}
_WITHOUT_KERNEL = ("IQ1_S", "IQ1_M")
BYTES_ON_GPU = {**_CODEBOOKS, **dict.fromkeys(_WITHOUT_KERNEL, 256 * DENSE_BYTES)}
# Types that llama.cpp has and that nothing here reads.
REFUSED = {
    "NVFP4": "part of its scales lies in tensors of their own",
    "TQ1_0": "a type for ternary models",
    "TQ2_0": "a type for ternary models",
}


class SizedTensor(TypedTensor, Protocol):
    """A tensor with its bytes in the file."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TypeCost:
    """``tensors`` tensors of a type that go the same way: their bytes in the file and on a GPU."""

    type: str
    way: Way
    tensors: int
    file_bytes: int
    gpu_bytes: int

    @property
    def more(self) -> int:
        return self.gpu_bytes - self.file_bytes


def gpu_nbytes(tensor: SizedTensor) -> int:
    """Bytes that a tensor's weights take on a GPU when they stay quantised."""
    per_256 = BYTES_ON_GPU.get(tensor.type.name)
    return tensor.nbytes if per_256 is None else prod(tensor.shape) * per_256 // 256


def cost_by_type(tensors: Iterable[SizedTensor], dense: Collection[str] = ()) -> tuple[TypeCost, ...]:
    """What quantised tensors cost on a GPU, those first that grow most; ``dense`` names the ones that vLLM needs dense.

    Tensors of dense types are left out: they are small, and stay as they are.
    """
    found: dict[tuple[str, Way], list[SizedTensor]] = {}
    for tensor in tensors:
        if tensor.type.block_elements > 1:
            found.setdefault((tensor.type.name, _way(tensor, dense)), []).append(tensor)
    costs = [
        TypeCost(
            name,
            way,
            len(group),
            sum(tensor.nbytes for tensor in group),
            sum(DENSE_BYTES * prod(t.shape) if way == "16 bits, vLLM needs it" else gpu_nbytes(t) for t in group),
        )
        for (name, way), group in found.items()
    ]
    return tuple(sorted(costs, key=lambda cost: (-cost.more, cost.type, cost.way)))


def _way(tensor: SizedTensor, dense: Collection[str]) -> Way:
    if tensor.name in dense:
        return "16 bits, vLLM needs it"
    if tensor.type.name in _WITHOUT_KERNEL:
        return "16 bits, no kernel reads the type"
    return "signs and magnitudes" if tensor.type.name in _CODEBOOKS else "as in the file"


def require_readable(tensors: Iterable[TypedTensor]) -> None:
    """Raise :class:`FileFormatError` naming every tensor of a type that is refused."""
    found: dict[str, list[str]] = {}
    for tensor in tensors:
        if tensor.type.name in REFUSED:
            found.setdefault(tensor.type.name, []).append(tensor.name)
    if found:
        words = "; ".join(f"{name} ({REFUSED[name]}): {collapse(names)}" for name, names in found.items())
        raise FileFormatError(
            f"weights of types that cannot be read: {words}",
            hint="choose another quantisation of llama.cpp's own types, such as UD-Q4_K_XL",
        )
