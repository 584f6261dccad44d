"""Norms between the parts of a layer against vLLM's own, for :mod:`tests.support.interpreted_layer`.

All layers of the real model run a step of prompts, too many rows for the kernel, and one of decoding, with the kernel
and without: ``error`` is the largest relative error of what the last norm gives in both, ``launched`` how often the
kernel ran in each, ``layers`` how many there are, ``built`` whether any norm of the CPU engine is to use it, and
``obstacles`` says why changed norms would not.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from glm5deploy.kernels import add_norm
from glm5deploy.vllm_plugin.norms import Glm5Norm, why_not
from tests.support import interpreted_layer as layer_support


def run(config: Any, model: Any, fused: bool, counts: Counter[str]) -> tuple[list[torch.Tensor], list[int]]:
    """What the last norm gives in each step, and launches of the kernel in it."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    layers = [layer.self_attn.mla_attn for layer in model.model.layers]
    for norm in (norm for norm in model.modules() if isinstance(norm, Glm5Norm)):
        norm.fused = fused and norm.hidden_size == layers[0].hidden_size
        norm._forward_method = norm.forward_cuda  # as where vLLM's kernels run
    names = []
    for layer in layers:
        layer_support.fuse(layer, "off")
        names.append(layer.mla_attn.layer_name)
        layer.mla_attn.kv_cache = torch.full((layer_support.BLOCKS, layer_support.BLOCK, 576), torch.nan)
        if layer.indexer is not None:
            keys = torch.full((layer_support.BLOCKS, layer_support.BLOCK, 132), 0xFF, dtype=torch.uint8)
            layer.indexer.k_cache.kv_cache = keys
            names.append(layer.indexer.k_cache.prefix)
    outputs, launched = [], []
    generator = torch.Generator().manual_seed(11)
    for queries, contexts in layer_support.STEPS:
        metadata, positions, slots = layer_support.step(config, queries, contexts)
        hidden = torch.randn(len(positions), layers[0].hidden_size, generator=generator)
        context = set_forward_context(
            dict.fromkeys(names, metadata), config, slot_mapping=dict.fromkeys(names, slots), num_tokens=len(positions)
        )
        counts.clear()
        with set_current_vllm_config(config), context, torch.inference_mode():
            outputs.append(model.model(None, positions, None, inputs_embeds=hidden)[: -layer_support.PADDING])
        launched.append(counts["norms"])
    return outputs, launched


def obstacles(config: Any, norm: Any) -> list[str | None]:
    """Of a norm where vLLM's kernels run, and with one thing after the other changed."""
    chosen = config.kernel_config.ir_op_priority
    chosen.rms_norm = chosen.fused_add_rms_norm = ["vllm_c", "native"]
    found = [why_not(norm, config)]
    for part, name, value in (
        (norm, "has_weight", False),
        (norm, "variance_size_override", 8),
        (chosen, "fused_add_rms_norm", ["native"]),
    ):
        before = getattr(part, name)
        setattr(part, name, value)
        found.append(why_not(norm, config))
        setattr(part, name, before)
    return found


def report(config: Any, model: Any) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    plain = add_norm.add_norm

    def counted(*arguments: Any) -> Any:
        counts["norms"] += 1
        return plain(*arguments)

    add_norm.add_norm = counted
    built = any(norm.fused for norm in model.modules() if isinstance(norm, Glm5Norm))
    expected, without = run(config, model, False, counts)
    found, launched = run(config, model, True, counts)
    assert without == [0, 0]
    return {
        "built": built,
        "layers": len(model.model.layers),
        "launched": launched,
        "error": max(layer_support.error(a, b) for a, b in zip(found, expected, strict=True)),
        "obstacles": obstacles(config, model.model.norm),
    }
