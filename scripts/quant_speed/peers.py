"""The kernels of vllm-gguf-plugin, called as its own layers call them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from quant_speed.cases import Routed, Weights

Call = Callable[[], torch.Tensor]


class Plugin:
    """vllm-gguf-plugin with vLLM, both needed. It rounds activations to eight bits a block of 32."""

    def __init__(self) -> None:
        import vllm._custom_ops as vllm_ops
        from vllm_gguf_plugin import ops
        from vllm_gguf_plugin.quantization import fused_moe

        if not getattr(ops, "_CUDA_ENABLED", False):
            raise ImportError("its CUDA extension is not loaded, and its Triton kernels are no measure")
        ops.moe_sum = vllm_ops.moe_sum  # the plugin's own call has the arguments of an older vLLM
        self._ops: Any = ops
        self._moe: Any = fused_moe._fused_moe_gguf

    def linear(self, x: torch.Tensor, weight: Weights) -> dict[str, Call]:
        """Its two kernels, [M, N] each. The one for few tokens is not given many: it works a token at a time."""
        rows, kind, n = weight.rows[0], TYPES_BY_NAME[weight.planes.format.name].id, weight.planes.rows
        calls: dict[str, Call] = {"matrix": lambda: self._ops.ggml_mul_mat_a8(rows, x, kind, n)}
        if x.shape[0] <= 16:
            calls["vector"] = lambda: self._ops.ggml_mul_mat_vec_a8(rows, x, kind, n)
        return calls

    def moe(self, call: Routed, merged: torch.Tensor, down: Weights, kind: str) -> Call:
        """Its layer. merged: rows of gate and up, one below the other, both of type ``kind``."""
        kinds = TYPES_BY_NAME[kind].id, TYPES_BY_NAME[down.planes.format.name].id
        return lambda: self._moe(call.x, merged, down.rows, call.share, call.ids, *kinds, "silu")


def plugin() -> Plugin | None:
    """None, with the reason said, where it or vLLM is not installed or does not load."""
    if importlib.util.find_spec("vllm_gguf_plugin") is None or importlib.util.find_spec("vllm") is None:
        print("vllm-gguf-plugin or vLLM is not installed")
        return None
    try:
        return Plugin()
    except (ImportError, AttributeError, OSError) as problem:
        print(f"vllm-gguf-plugin is left out: {problem}")
        return None
