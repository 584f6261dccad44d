"""Which tensor-parallel sizes a file allows, checked per tensor and type before a model is built.

A cut between rows is always legal; a cut along a row must fall between blocks of the row's type, or a rank would get
half a super-block and read it as something else without any error. GLM-5's expert rows of 2048 hold 8 K-quant blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa import tensor_names
from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.name_ranges import collapse


class BlockType(Protocol):
    """A GGML type: ``block_elements`` consecutive elements of a row stand together."""

    @property
    def name(self) -> str: ...
    @property
    def block_elements(self) -> int: ...


class TypedTensor(tensor_names.NamedShape, Protocol):
    """A tensor with its GGML type; ``gguf_files`` provides such, shape in ne order."""

    @property
    def type(self) -> BlockType: ...


@dataclass(frozen=True, slots=True)
class IllegalCut:
    """``tp`` ranks would cut rows of ``columns`` elements inside a block of ``block_elements``."""

    tensor: str
    type: str
    columns: int
    block_elements: int


def illegal_cuts(
    tensors: Iterable[TypedTensor], hparams: Hparams, tp: int, *, expert_parallel: bool = False
) -> tuple[IllegalCut, ...]:
    """The row-parallel tensors whose rows cannot be cut into ``tp`` whole-block parts.

    Dense types have blocks of one element and only need ``columns % tp == 0``. With ``expert_parallel`` routed experts
    are handed out whole and not cut. Give the tensors that the model uses: dropped ones are not cut either.
    """
    found = []
    for tensor in tensors:
        placement = tensor_names.place(tensor.name, hparams)
        if placement is None or placement.kind.cut not in ("input", "expert input"):
            continue
        if placement.kind.cut == "expert input" and expert_parallel:
            continue
        columns, block = tensor.shape[0], tensor.type.block_elements
        if columns % tp or (columns // tp) % block:
            found.append(IllegalCut(tensor.name, tensor.type.name, columns, block))
    return tuple(found)


def indivisible_dimensions(hparams: Hparams, tp: int, *, expert_parallel: bool = False) -> tuple[str, ...]:
    """The dimensions that ``tp`` does not divide, in words; these forbid a size whatever the types."""
    sizes = [
        ("attention heads", hparams.num_heads),
        ("columns of the dense MLP", hparams.dense_intermediate_size),
        ("columns of the shared experts", hparams.shared_intermediate_size),
    ]
    if not expert_parallel:
        sizes.append(("columns of an expert", hparams.moe_intermediate_size))
    return tuple(f"{size} {what}" for what, size in sizes if size % tp)


def require_legal_tensor_parallel(
    tensors: Sequence[TypedTensor],
    hparams: Hparams,
    tp: int,
    *,
    expert_parallel: bool = False,
    dequantised: bool = False,
) -> None:
    """Raise :class:`UsageError` unless ``tp`` ranks can share the model; the hint names sizes that work.

    ``dequantised``: the loader turns every weight into dense numbers first (CPU engine), so block edges do not matter.
    """
    if tp < 1:
        raise UsageError(f"tensor-parallel size {tp} is not a positive number")
    uneven = indivisible_dimensions(hparams, tp, expert_parallel=expert_parallel)
    cuts = () if dequantised else illegal_cuts(tensors, hparams, tp, expert_parallel=expert_parallel)
    if not uneven and not cuts:
        return
    if uneven:
        message = f"tensor-parallel size {tp} does not divide the model's {', '.join(uneven)}"
    else:
        message = f"tensor-parallel size {tp} would cut quantisation blocks: {_words(cuts, tp)}"
    raise UsageError(message, hint=_alternatives(tensors, hparams, tp, expert_parallel, dequantised))


def _words(cuts: Sequence[IllegalCut], tp: int) -> str:
    groups: dict[tuple[str, int, int], list[str]] = {}
    for cut in cuts:
        groups.setdefault((cut.type, cut.columns, cut.block_elements), []).append(cut.tensor)
    return "; ".join(
        f"{collapse(names)} ({kind}: rows of {columns}, {columns / tp:g} per rank, blocks of {block})"
        for (kind, columns, block), names in groups.items()
    )


def _alternatives(
    tensors: Sequence[TypedTensor], hparams: Hparams, tp: int, expert_parallel: bool, dequantised: bool
) -> str:
    def legal(size: int, with_ep: bool) -> bool:
        return not indivisible_dimensions(hparams, size, expert_parallel=with_ep) and (
            dequantised or not illegal_cuts(tensors, hparams, size, expert_parallel=with_ep)
        )

    ways = []
    if not expert_parallel and legal(tp, True):
        ways.append(f"TP {tp} with expert parallelism (--ep)")
    smaller = [size for size in range(1, tp) if legal(size, expert_parallel)]
    divisors = [size for size in smaller if tp % size == 0 and tp // size <= hparams.num_layers]
    if divisors:
        ways.append(f"TP {divisors[-1]} with pipeline parallelism {tp // divisors[-1]} on the same {tp} GPUs")
    if smaller and (not divisors or smaller[-1] != divisors[-1]):
        ways.append(f"TP {smaller[-1]} on fewer GPUs")
    return "Use " + ", or ".join(ways) + "." if ways else "Choose another quantisation."
