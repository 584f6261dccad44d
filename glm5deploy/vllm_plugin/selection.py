"""The operation behind the indexer: store this step's keys, score, select. Opaque to torch.compile and CUDA graphs."""

# No `from __future__ import annotations` here: torch derives the operation's schema from annotations that are objects.
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from glm5deploy.vllm_plugin import trace
from glm5deploy.vllm_plugin.metadata import SparseMetadata


@eager_break_during_capture  # type: ignore[untyped-decorator]
def glm5_select(
    q: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    factor: float,
    selected: torch.Tensor,
    topk: int,
    layer_name: LayerNameType,
) -> None:
    """Store the step's keys, then write each token's best ``topk`` positions into ``selected``.

    q [T, J, 128] and key [T, 128] as their projections give them, weights [T, J], the key's LayerNorm (weight and bias
    [128], eps), positions int [T], cos_sin [P, 64] (cosines, then sines), ``factor`` on the weights, selected int32
    [most, topk].
    """
    layer = _resolve_layer_name(layer_name)
    metadata, cache = _context(layer)
    kernels = _kernels(q.device)
    if metadata is None:
        selected[: q.shape[0]] = -1
        kernels.profile(q.device)
        return
    tokens = metadata.num_actual_tokens
    # What the selection leaves as it is; behind a GPU's decoding rows that is nothing, and no launch.
    written = metadata.rows_selected(topk) if selected.is_cuda and selected.shape[1] == topk else 0
    selected[written : q.shape[0]] = -1
    norm, slots = (norm_weight, norm_bias, eps), metadata.slot_mapping[:tokens]
    step = (q[:tokens], key[:tokens], weights[:tokens])
    values, folded = kernels.index_input(*step, norm, positions[:tokens], cos_sin, factor, slots, cache)
    kernels.select(values, folded, cache, metadata, selected, topk)
    trace.count(layer, metadata, topk)
    trace.record(layer, metadata, selected[:tokens])


def _kernels(device: torch.device) -> Any:
    """The module whose functions run on the device: Triton kernels on a GPU, torch on a CPU."""
    if device.type == "cpu":
        from glm5deploy.vllm_plugin import host

        return host
    from glm5deploy.vllm_plugin import device as gpu

    return gpu


def _context(layer: str) -> tuple[SparseMetadata | None, torch.Tensor]:
    context = get_forward_context()
    step: Any = context.attn_metadata
    if isinstance(step, list):
        step = step[0]
    cache = context.no_compile_layers[layer].kv_cache
    return (step[layer] if isinstance(step, dict) else None), cache


def select(
    q: torch.Tensor,
    weights: torch.Tensor,
    cache: torch.Tensor,
    metadata: SparseMetadata,
    selected: torch.Tensor,
    topk: int,
) -> None:
    """Select for every token of the step from prepared queries and stored keys, on whatever device they are.

    q [T, J, 128] and weights fp32 [T, J] as ``index_input`` gives them; cache uint8 [blocks, block size, 132]
    holds the keys of every request's context; ``selected`` int32 [most, topk] is written in place.
    """
    _kernels(q.device).select(q, weights, cache, metadata, selected, topk)


def _fake(
    q: torch.Tensor,
    key: torch.Tensor,
    weights: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    factor: float,
    selected: torch.Tensor,
    topk: int,
    layer_name: LayerNameType,
) -> None:
    return None


direct_register_custom_op(op_name="glm5_select", op_func=glm5_select, mutates_args=["selected"], fake_impl=_fake)
OP = torch.ops.vllm.glm5_select
