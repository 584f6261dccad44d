"""Linear layers, embedding and output head whose weights stay as the GGUF file has them, in kernel order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase

from glm5deploy.errors import DeployError
from glm5deploy.quants.planes import Planes, empty_planes
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.quantised_modules import Module
from glm5deploy.vllm_plugin.slabs import Slab, Source


def share(source: Source, total: int, part: int, index: int) -> range:
    """Part ``index`` of ``total`` rows or columns in parts of ``part``; DeployError when they do not divide."""
    if not part or total % part or not 0 <= index < total // part:
        raise DeployError(f"{source.tensor.name}: {total} cannot be dealt out in parts of {part} (part {index} wanted)")
    return range(index * part, (index + 1) * part)


class PlaneParameters:
    """Planes of a module as parameters of its layer: ``planes0_low``, ``planes0_words``, ``planes1_low``…

    Neighbouring parts of one type may be joined: their rows lie in one set of planes, and one product takes them all.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.spec = ""
        self.names: tuple[str, ...] = ()
        self._rows: list[list[int]] = []  # of the parts in each set of planes

    def create(
        self, layer: nn.Module, shapes: Sequence[tuple[int, int]], experts: int = 1, *, join: bool = False
    ) -> None:
        """Uninitialised planes [experts, rows, columns] for every part, on the default device."""
        specs, names = [], []
        device = str(torch.get_default_device())
        parts = [(source.planes_type, *shape) for source, shape in zip(self.module.parts, shapes, strict=True)]
        alike = [list(same) for _, same in groupby(parts, key=lambda part: (part[0], part[2]))]
        sets = alike if join else [[part] for part in parts]
        self._rows = [[rows for _, rows, _ in members] for members in sets]
        for i, members in enumerate(sets):
            (kind, _, columns), rows = members[0], sum(self._rows[i])
            planes = empty_planes(kind, rows, columns, experts, device)
            specs.append(ops.describe(planes.format, rows, columns))
            for name, tensor in zip(ops.plane_names(planes.format), planes.tensors, strict=True):
                names.append(f"planes{i}_{name}")
                layer.register_parameter(names[-1], nn.Parameter(tensor, requires_grad=False))
        self.spec, self.names = ",".join(specs), tuple(names)

    def tensors(self, layer: nn.Module) -> list[torch.Tensor]:
        return [getattr(layer, name) for name in self.names]

    def planes(self, layer: nn.Module) -> list[Planes]:
        """What products take: one of joined parts."""
        return ops.assemble(self.spec, [tensor.data for tensor in self.tensors(layer)])

    def parts(self, layer: nn.Module) -> Iterator[Planes]:
        """Each part's own rows, for what fills them."""
        for planes, rows in zip(self.planes(layer), self._rows, strict=True):
            start = 0
            for count in rows:
                yield _rows_of(planes, start, start + count)
                start += count


def _rows_of(planes: Planes, start: int, stop: int) -> Planes:
    """Rows of every expert as views."""
    views = (
        None if t is None else t[:, :, :, start:stop] for t in (planes.low, planes.high, planes.words, planes.halves)
    )
    return Planes(planes.format, stop - start, planes.columns, *views)  # type: ignore[arg-type]


class Glm5LinearMethod(LinearMethodBase):
    """A linear layer of one or more parts, each of its own type; the layer says which part of them is this rank's."""

    def __init__(self, module: Module) -> None:
        self.parameters = PlaneParameters(module)

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        if len(output_partition_sizes) != len(self.parameters.module.parts):
            raise DeployError(
                f"{self.parameters.module.prefix} is built of {len(output_partition_sizes)} parts, the file has "
                f"{len(self.parameters.module.parts)}"
            )
        shapes = [(rows, input_size_per_partition) for rows in output_partition_sizes]
        self.parameters.create(layer, shapes, join=True)

    def slabs(self, layer: nn.Module) -> Iterator[Slab]:
        """What this rank reads for the layer."""
        for source, planes in zip(self.parameters.module.parts, self.parameters.parts(layer), strict=True):
            rows = share(source, source.rows, planes.rows, _part(layer, source.rows // max(1, planes.rows)))
            columns = share(source, source.columns, planes.columns, _part(layer, source.columns // planes.columns))
            yield Slab(source, planes, (0,), rows, columns)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out: torch.Tensor = ops.linear(x, self.parameters.tensors(layer), self.parameters.spec)
        return out if bias is None else out + bias


class Glm5EmbeddingMethod(Glm5LinearMethod):
    """The token embedding or the output head: cut by rows, the last rank's rows filled up with zeros."""

    def slabs(self, layer: Any) -> Iterator[Slab]:
        (source,), (planes,) = self.parameters.module.parts, self.parameters.planes(layer)
        indices = layer.shard_indices
        if indices.num_added_elements or layer.org_vocab_size != source.rows:
            raise DeployError(f"{source.tensor.name} has {source.rows} rows, the model wants {layer.num_embeddings}")
        rows = range(indices.org_vocab_start_index, indices.org_vocab_end_index)
        yield Slab(source, planes, (0,), rows, range(source.columns))

    def embedding(self, layer: Any, input_: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ops.embed(input_, self.parameters.tensors(layer), self.parameters.spec, layer.params_dtype)
        return out

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """The head has planes of its own, read from the embedding's tensor."""
        return layer


def _part(layer: Any, parts: int) -> int:
    """This rank's place among ``parts``: its tensor-parallel rank, or the first where nothing is cut."""
    if parts not in (1, layer.tp_size):
        raise DeployError(f"{layer.prefix} is cut into {parts} parts among {layer.tp_size} ranks")
    return int(layer.tp_rank) if parts > 1 else 0
