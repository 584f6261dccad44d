"""Quantisation method ``glm5_gguf``: how the layers of a GGUF-loaded model hold their weights.

Weights are dequantised while they are loaded, so every layer keeps vLLM's unquantised method.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from glm5deploy.vllm_plugin import QUANTIZATION


class Glm5GgufConfig(QuantizationConfig):
    """Dense weights in every layer."""

    @classmethod
    def get_name(cls) -> Any:
        return QUANTIZATION

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Glm5GgufConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
