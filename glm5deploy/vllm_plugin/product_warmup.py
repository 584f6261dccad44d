"""Every launch of the products that a quantised model's layers will need, whatever the number of tokens.

Layers of equal types and shapes run the same kernels: one of each kind is called, with its own weights, once for every
way in which the launch depends on the number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from glm5deploy.kernels.prepare import Launch, first_of_each
from glm5deploy.quants import products, routed_experts
from glm5deploy.quants.planes import Planes
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.linear_pair import pairs
from glm5deploy.vllm_plugin.quantised_linear import Glm5EmbeddingMethod, PlaneParameters
from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod

# Rows of an embedding: one, a multiple of 16, and neither, as Triton tells integers apart.
_EMBEDDED = (1, 2, 16)


_layers: list[weakref.ref[nn.Module]] = []


def remember(layers: Iterable[nn.Module]) -> None:
    """Layers with a method of ours whose weights have been filled; kept as long as their model is."""
    _layers.extend(weakref.ref(layer) for layer in layers)


def launches(max_tokens: int, dtype: torch.dtype) -> list[Launch]:
    """For remembered layers and pairs of layers, activations of ``dtype``, and steps of 1 to ``max_tokens`` tokens."""
    kinds: dict[Hashable, Any] = {}
    for reference in _layers:
        layer = reference()
        if layer is not None:
            kinds.setdefault(_kind(layer), layer)
    found = [launch for layer in kinds.values() for launch in _of_layer(layer, max_tokens, dtype)]
    for pair in {pair.spec: pair for pair in pairs()}.values():
        found += _linear(pair.tensors(), pair.spec, pair.planes(), max_tokens, dtype)
    return found


def _kind(layer: Any) -> Hashable:
    method = layer.quant_method
    return method.parameters.spec, isinstance(method, Glm5MoeMethod), _embeds(layer)


def _embeds(layer: Any) -> bool:
    """Whether rows are looked up in the layer; an output head has the same method and is multiplied with."""
    return isinstance(layer.quant_method, Glm5EmbeddingMethod) and not isinstance(layer, ParallelLMHead)


def _of_layer(layer: Any, max_tokens: int, dtype: torch.dtype) -> Iterator[Launch]:
    parameters: PlaneParameters = layer.quant_method.parameters
    tensors, spec, planes = parameters.tensors(layer), parameters.spec, parameters.planes(layer)
    if isinstance(layer.quant_method, Glm5MoeMethod):
        most = min(max_tokens, ops.MOE_TOKENS)
        yield from _experts(tensors, spec, planes, layer.moe_config.experts_per_token, most, dtype)
    elif _embeds(layer):
        for tokens in _EMBEDDED:
            ids = torch.zeros(tokens, dtype=torch.int64, device=tensors[0].device)
            yield Launch(("embed", spec, tokens), partial(ops.embed, ids, tensors, spec, dtype))
    else:
        yield from _linear(tensors, spec, planes, max_tokens, dtype)


def _linear(
    tensors: list[torch.Tensor], spec: str, planes: list[Planes], max_tokens: int, dtype: torch.dtype
) -> Iterator[Launch]:
    def key(tokens: int) -> Hashable:
        if len(planes) == 2:
            return products.linear_pair_key(tokens, planes[0], planes[1], planes[0].low.device)
        return tuple(products.linear_key(tokens, part, part.low.device) for part in planes)

    def call(tokens: int) -> None:
        x = torch.zeros((tokens, planes[0].columns), dtype=dtype, device=tensors[0].device)
        ops.linear(x, tensors, spec)

    kinds = tuple((part.format.name, part.rows % 16 == 0, part.columns % 16 == 0) for part in planes)
    for tokens in first_of_each(key, range(1, max_tokens + 1)):
        yield Launch(("linear", kinds, key(tokens)), partial(call, tokens))


def _experts(
    tensors: list[torch.Tensor], spec: str, planes: list[Planes], topk: int, most: int, dtype: torch.dtype
) -> Iterator[Launch]:
    gate, up, down = planes

    def key(tokens: int) -> Hashable:
        return routed_experts.moe_key(tokens, gate, up, down, topk, gate.low.device)

    def call(tokens: int) -> None:
        device = tensors[0].device
        x = torch.zeros((tokens, gate.columns), dtype=dtype, device=device)
        ids = torch.arange(tokens * topk, dtype=torch.int32, device=device).remainder_(gate.experts)
        ops.moe(x, tensors, spec, ids.view(tokens, topk), torch.zeros((tokens, topk), device=device))

    kinds = tuple(part.format.name for part in planes)
    for tokens in first_of_each(key, range(1, most + 1)):
        yield Launch(("experts", kinds, key(tokens)), partial(call, tokens))
