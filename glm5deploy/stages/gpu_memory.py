"""What a model's weights take on a GPU, by type, as rows for a table and as a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

from glm5deploy.glm_dsa.weight_types import DENSE_BYTES, SizedTensor, cost_by_type


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """``rows`` name every quantised type, those first that grow most; ``total`` and ``more`` are bytes."""

    rows: list[dict[str, object]]
    total: int
    more: int

    @property
    def sentence(self) -> str:
        """How much, how much more than in the file, and which types are to blame."""
        grown = [row for row in self.rows if int(str(row["more_bytes"])) > 0]
        blame = "; ".join(f"{row['type']} +{_gb(row['more_bytes'])} ({row['how']})" for row in grown)
        total = f"weights take {_gb(self.total)}"
        return f"{total}, {_gb(self.more)} more than in the file: {blame}" if grown else f"{total}, as in the file"


def gpu_memory(tensors: Iterable[SizedTensor], dense: Collection[str] = ()) -> GpuMemory:
    """Over all ranks together; ``dense`` names the tensors that vLLM needs dense."""
    tensors = list(tensors)
    costs = cost_by_type(tensors, dense)
    rows: list[dict[str, object]] = [
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


def _gb(nbytes: object) -> str:
    size = int(str(nbytes))
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
