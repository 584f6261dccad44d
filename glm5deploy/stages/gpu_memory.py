"""What a model's weights take on a GPU, by type, as rows for a table and as a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from glm5deploy.glm_dsa.weight_types import DENSE_BYTES, SizedTensor, cost_by_type
from glm5deploy.sizes import human_bytes


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """``rows`` name every quantised type, those first that grow most; ``total`` and ``more`` are bytes."""

    rows: list[dict[str, Any]]
    total: int
    more: int

    @property
    def sentence(self) -> str:
        """How much, how much more than in the file, and which types are to blame."""
        grown = [row for row in self.rows if row["more_bytes"] > 0]
        blame = "; ".join(f"{row['type']} +{human_bytes(row['more_bytes'])} ({row['how']})" for row in grown)
        how = f"{human_bytes(self.more)} more than in the file: {blame}" if grown else "as in the file"
        return f"weights take {human_bytes(self.total)}, {how}"


def gpu_memory(tensors: Iterable[SizedTensor], dense: Collection[str] = ()) -> GpuMemory:
    """Over all ranks together; ``dense`` names the tensors that vLLM needs dense."""
    tensors = list(tensors)
    costs = cost_by_type(tensors, dense)
    rows: list[dict[str, Any]] = [
        {
            "type": cost.type,
            "tensors": cost.tensors,
            "how": cost.way,
            "file_bytes": cost.file_bytes,
            "gpu_bytes": cost.gpu_bytes,
            "more_bytes": cost.more,
        }
        for cost in costs
    ]
    plain = sum(DENSE_BYTES * prod(tensor.shape) for tensor in tensors if tensor.type.block_elements == 1)
    return GpuMemory(rows, plain + sum(cost.gpu_bytes for cost in costs), sum(cost.more for cost in costs))
