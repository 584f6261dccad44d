"""Routed experts whose weights stay as the GGUF file has them; gate, up and down may differ in type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from glm5deploy.errors import DeployError
from glm5deploy.quants.token_experts import Choice, Shared
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.quantised_linear import PlaneParameters, share
from glm5deploy.vllm_plugin.quantised_modules import Module
from glm5deploy.vllm_plugin.slabs import Slab


class Glm5MoeMethod(FusedMoEMethodBase):
    """Experts cut by tensor parallelism, or whole experts dealt out by expert parallelism."""

    def __init__(self, moe: Any, module: Module) -> None:
        super().__init__(moe)
        if len(module.parts) != 3:
            raise DeployError(f"{module.prefix} needs gate, up and down matrices; the file has {len(module.parts)}")
        self.parameters = PlaneParameters(module)

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        inner = intermediate_size_per_partition
        shapes = [(inner, hidden_size), (inner, hidden_size), (hidden_size, inner)]
        self.parameters.create(layer, shapes, num_experts)

    def slabs(self, layer: Any) -> Iterator[Slab]:
        """What this rank reads for the layer."""
        experts = local_experts(layer)
        index = int(layer.moe_config.tp_rank)
        for source, planes in zip(self.parameters.module.parts, self.parameters.planes(layer), strict=True):
            if source.experts != layer.global_num_experts:
                raise DeployError(f"{source.tensor.name} has {source.experts} experts, not {layer.global_num_experts}")
            rows = share(source, source.rows, planes.rows, index if planes.rows < source.rows else 0)
            columns = share(source, source.columns, planes.columns, index if planes.columns < source.columns else 0)
            yield Slab(source, planes, experts, rows, columns)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, hidden], topk_ids and topk_weights [T, TOPK] -> this rank's part of the sum, [T, hidden].

        Rows of padding have ids < 0 and give zeros. vLLM runs the shared experts itself: up to 256 tokens beside
        router and routed experts, on a stream of their own.
        """
        return self.sum(layer, x, topk_weights, topk_ids)

    def sum(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        also: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As ``apply``, and what ``also`` gives is added: see :func:`quantised_ops.moe`."""
        mine = layer.expert_map
        # A negative index would take the last expert's place.
        ids = topk_ids if mine is None else torch.where(topk_ids < 0, -1, mine[topk_ids])
        # One type each, whatever router ran: kernels are compiled for types, and warm-up has these.
        ids, weights = ids.to(torch.int32), topk_weights.to(torch.float32)
        return ops.moe(x, self.parameters.tensors(layer), self.parameters.spec, ids, weights, also)

    def with_shared(self, layer: Any, x: torch.Tensor, shared: Shared, choice: Choice) -> torch.Tensor:
        """As ``sum``, of one token and of all experts on this rank, which are chosen there, and of the shared one."""
        return ops.experts_of_one(x, self.parameters.planes(layer), shared, choice)


def local_experts(layer: Any) -> list[int]:
    """The experts of this rank, in the order of its planes."""
    places = {layer.expert_map_manager.map_global_to_local(e): e for e in range(layer.global_num_experts)}
    missing = [i for i in range(layer.local_num_experts) if i not in places]
    if missing:
        raise DeployError(f"{layer.layer_name}: no expert for the places {missing} of this rank")
    return [places[i] for i in range(layer.local_num_experts)]
