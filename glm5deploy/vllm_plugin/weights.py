"""GGUF tensors as a stream of (Hugging Face name, dense tensor), one at a time, each rank's part only.

A tensor that a rank will cut is handed over at full size, but only the rank's part is read and dequantised; the rest is
NaN. So vLLM's own placement stays in charge, and if it ever took another part than foreseen here, the check after
loading would find NaN in the parameter instead of the model serving wrong numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.glm_dsa.tensor_kinds import Cut
from glm5deploy.glm_dsa.tensor_names import Placement

_CHUNK_BYTES = 64 << 20  # fp32 bytes dequantised at once
_VOCABULARY_PADDING = 64  # vLLM cuts the vocabulary after padding it to a multiple of this


@dataclass(frozen=True, slots=True)
class Rank:
    """The tensor-parallel rank that loads; ``expert_parallel``: whole experts are spread over ranks, not cut."""

    index: int = 0
    size: int = 1
    expert_parallel: bool = False

    def share(self, length: int) -> range:
        """This rank's part of a dimension of ``length``; the whole dimension when it cannot be cut evenly."""
        if self.size == 1 or length % self.size:
            return range(length)
        part = length // self.size
        return range(self.index * part, (self.index + 1) * part)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a tensor on disk: uint8 [rows, bytes a row] of ``columns`` elements each."""

    data: np.ndarray
    type: GGMLQuantizationType
    columns: int
    block: int

    @classmethod
    def of(cls, tensor: ShardTensor, offset: int = 0, rows: int | None = None) -> Matrix:
        """``rows`` rows of ``tensor`` from row ``offset``, mapped from the file, not read."""
        columns = tensor.shape[0]
        width = tensor.type.nbytes(columns)
        count = tensor.nbytes // width if rows is None else rows
        data = np.memmap(tensor.path, np.uint8, "r", tensor.offset + offset * width, (count, width))
        return cls(data, GGMLQuantizationType(tensor.type.id), columns, tensor.type.block_elements)

    def dense(self, dtype: torch.dtype, rows: range | None = None, columns: range | None = None) -> torch.Tensor:
        """[all rows, all columns] of ``dtype``; NaN outside ``rows`` and ``columns``, where given."""
        count = len(self.data)
        rows, columns = rows or range(count), columns or range(self.columns)
        if columns.start % self.block or columns.stop % self.block:
            columns = range(self.columns)  # the cut splits a block: whole rows it is
        whole = len(rows) == count and len(columns) == self.columns
        out = torch.empty((count, self.columns), dtype=dtype)
        if not whole:
            out.fill_(torch.nan)
        width = self.data.shape[1] // (self.columns // self.block)
        first, last = columns.start // self.block * width, columns.stop // self.block * width
        step = max(1, _CHUNK_BYTES // (4 * self.columns))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            numbers = dequantize(np.array(self.data[part, first:last]), self.type)
            out[part, columns.start : columns.stop] = torch.from_numpy(numbers)
        return out


def stream(
    placements: tuple[Placement, ...], tensors: Mapping[str, ShardTensor], dtype: torch.dtype, rank: Rank
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every placed tensor under its Hugging Face name, in ``dtype``; fp32 where vLLM keeps fp32 (see `_dtype`).

    At most one tensor is held, and of kv_b the half whose partner has not come yet.
    """
    halves: dict[str, tuple[str, torch.Tensor]] = {}
    for placement in placements:
        tensor = tensors[placement.name]
        kind, name = placement.kind, placement.hf_name
        if kind.transform in ("k_b", "v_b"):
            half = _heads(placement, tensor, dtype, rank)
            if name not in halves:
                halves[name] = (kind.transform, half)
            else:
                other, partner = halves.pop(name)
                assert other != kind.transform
                yield name, _join(half, partner) if kind.transform == "k_b" else _join(partner, half)
        elif kind.transform in ("experts", "gate_up_experts"):
            yield from _experts(placement, tensor, dtype, rank)
        else:
            rows, columns = _part(kind.cut, tensor, rank, placement.kind.role == "embeddings")
            dense = Matrix.of(tensor).dense(_dtype(placement, tensor, dtype), rows, columns)
            yield name, dense if len(tensor.shape) > 1 else dense.flatten()
    assert not halves, "the plan admits complete pairs only"


def _dtype(placement: Placement, tensor: ShardTensor, dtype: torch.dtype) -> torch.dtype:
    """fp32 for what vLLM may hold in fp32 (router, norms) and for fp32 files, whose one rounding vLLM's copy does."""
    if placement.kind.role in ("router", "norms") or len(placement.shape) == 1 or tensor.type.name == "F32":
        return torch.float32
    return dtype


def _part(cut: Cut, tensor: ShardTensor, rank: Rank, vocabulary: bool) -> tuple[range | None, range | None]:
    if cut == "output":
        rows = tensor.shape[1]
        if vocabulary and rows % _VOCABULARY_PADDING:
            return None, None
        return rank.share(rows), None
    if cut == "input":
        return None, rank.share(tensor.shape[0])
    return None, None


def _heads(placement: Placement, tensor: ShardTensor, dtype: torch.dtype, rank: Rank) -> torch.Tensor:
    """A half of kv_b as [heads, rows a head, columns], this rank's heads only."""
    columns, rows, heads = placement.shape
    mine = rank.share(heads)
    dense = Matrix.of(tensor).dense(dtype, range(mine.start * rows, mine.stop * rows))
    return dense.view(heads, rows, columns)


def _join(k_b: torch.Tensor, v_b: torch.Tensor) -> torch.Tensor:
    """k_b [H, latent, nope] and v_b [H, value, latent] -> kv_b [H * (nope + value), latent], key rows first."""
    return torch.cat((k_b.transpose(1, 2), v_b), dim=1).flatten(0, 1)


def _experts(
    placement: Placement, tensor: ShardTensor, dtype: torch.dtype, rank: Rank
) -> Iterator[tuple[str, torch.Tensor]]:
    columns, rows, experts = placement.shape
    cut = not rank.expert_parallel
    fused = placement.kind.transform == "gate_up_experts"
    parts = ("gate_proj", "up_proj") if fused else (None,)
    height = rows // len(parts)
    for expert in range(experts):
        for index, part in enumerate(parts):
            matrix = Matrix.of(tensor, expert * rows + index * height, height)
            mine = rank.share(height) if cut and placement.kind.cut == "expert output" else None
            across = rank.share(columns) if cut and placement.kind.cut == "expert input" else None
            name = placement.expert_name(expert)
            yield name.replace("gate_up_proj", part) if part else name, matrix.dense(dtype, mine, across)
