"""Two linear layers that multiply the same activations, in one launch for few tokens.

vLLM calls one layer after the other; where both hold a quantised weight of ours, the operation that multiplies with a
layer's parts takes the parts of two layers as well. Beyond `launch.PAIR_TOKENS` tokens it makes two launches.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear

from glm5deploy.quants.planes import Planes
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.quantised_linear import Glm5LinearMethod, PlaneParameters

_made: list[weakref.ref[LinearPair]] = []


class LinearPair:
    """Both layers, which stay parts of where they are: this is no module, or their parameters would have two names."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        methods: list[Any] = [first.quant_method, second.quant_method]
        self._layers = first, second
        self._parameters: list[PlaneParameters] = [method.parameters for method in methods]
        self.spec = ",".join(parameters.spec for parameters in self._parameters)
        self._rows = [int(parameters.spec.split(":")[1]) for parameters in self._parameters]
        _made.append(weakref.ref(self))

    def tensors(self) -> list[torch.Tensor]:
        """Planes of both layers, as :attr:`spec` lists them."""
        both = zip(self._parameters, self._layers, strict=True)
        return [tensor for parameters, layer in both for tensor in parameters.tensors(layer)]

    def planes(self) -> list[Planes]:
        return [parameters.planes(layer)[0] for parameters, layer in zip(self._parameters, self._layers, strict=True)]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, K] -> [T, rows of the first] and [T, rows of the second]: views, a row of one beside the other's."""
        first, second = ops.linear(x, self.tensors(), self.spec).split(self._rows, dim=-1)
        return first, second


def pair_of(first: Any, second: Any) -> LinearPair | None:
    """None where a layer does more than multiply with one quantised weight of ours, or is no such layer."""
    layers = first, second
    plain = all(type(layer) in (ColumnParallelLinear, ReplicatedLinear) and layer.bias is None for layer in layers)
    if not plain or any(type(layer.quant_method) is not Glm5LinearMethod for layer in layers):
        return None
    whole = all(len(layer.quant_method.parameters.module.parts) == 1 for layer in layers)
    gathers = any(getattr(layer, "gather_output", False) and layer.tp_size > 1 for layer in layers)
    return LinearPair(first, second) if whole and first.input_size == second.input_size and not gathers else None


def pairs() -> list[LinearPair]:
    """All that were made and are in use; kept as long as their model is."""
    found = (reference() for reference in _made)
    return [pair for pair in found if pair is not None]
