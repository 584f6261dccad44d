"""The quantisation configuration of a model that keeps its weights quantised; its loader makes it from the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from glm5deploy.vllm_plugin.quantised_linear import Glm5EmbeddingMethod, Glm5LinearMethod
from glm5deploy.vllm_plugin.quantised_modules import Module
from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod
from glm5deploy.vllm_plugin.quantization import Glm5GgufConfig

METHODS = (Glm5LinearMethod, Glm5MoeMethod)


class QuantisedGgufConfig(Glm5GgufConfig):
    """Our method for the modules of ``modules``, vLLM's unquantised one for all others."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        super().__init__()
        self.modules = modules

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        module = self.modules.get(prefix)
        if isinstance(layer, RoutedExperts):
            return Glm5MoeMethod(layer.moe_config, module) if module else None
        if isinstance(layer, VocabParallelEmbedding):
            return Glm5EmbeddingMethod(module) if module else None
        if isinstance(layer, LinearBase):
            return Glm5LinearMethod(module) if module else UnquantizedLinearMethod()
        return None
