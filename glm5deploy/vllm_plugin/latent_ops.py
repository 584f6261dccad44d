"""The operations of :mod:`glm5deploy.vllm_plugin.latent_attention`, opaque to torch.compile as vLLM's own ones are."""

# No `from __future__ import annotations` here: torch derives the operations' schemas from annotations that are objects.
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from glm5deploy.kernels.layout import PACKED_ROW_BYTES, QK_DIM
from glm5deploy.vllm_plugin import PACKED, index_product


def glm5_latent_input(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    layer_name: LayerNameType,
    hidden_states: torch.Tensor | None,
    index_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm the latents x [T, R + 576] of query and key, store the key's with its RoPE: the query's [T, R].

    With ``hidden_states`` [T, K] and ``index_weight`` [N, K] their product [T, N] as well, of one or two tokens in the
    same launch; the second tensor is empty otherwise.

    Part of every CUDA graph, where vLLM's own store runs between the pieces of one: slots lie in a buffer that keeps
    its address. RuntimeError where a graph is captured without them, whose replays would store nothing.
    """
    from glm5deploy.kernels.latent_input import latent_input
    from glm5deploy.kernels.row_product import BESIDE_TOKENS

    name = _resolve_layer_name(layer_name)
    _, attention, cache, slots = get_attention_context(name)
    if slots is None and cache.numel() and x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name}: a graph is captured without slots for the cache")
    if slots is None or not cache.numel():
        slots, cache = positions.new_empty(0), _no_cache(attention, x)
    arguments = (x, q_weight, kv_weight, eps, positions, cos_sin, slots.flatten()[: x.shape[0]], cache)
    if hidden_states is None or index_weight is None:
        return latent_input(*arguments), x.new_empty(0)
    if len(hidden_states) > BESIDE_TOKENS or not hidden_states.is_contiguous():
        return latent_input(*arguments), index_product.glm5_index_product(hidden_states, index_weight)
    product = hidden_states.new_empty((len(hidden_states), len(index_weight)))
    return latent_input(*arguments, (hidden_states, index_weight, product)), product


def _no_cache(attention: Any, x: torch.Tensor) -> torch.Tensor:
    """What a profiling run, which has no cache yet, names instead: the kernel is then the one that serving runs."""
    from glm5deploy.vllm_plugin.engine_config import BLOCK_SIZE

    if attention.kv_cache_dtype == PACKED:
        return torch.empty((1, BLOCK_SIZE, PACKED_ROW_BYTES), dtype=torch.uint8, device=x.device)
    return x.new_empty((1, BLOCK_SIZE, QK_DIM))


def _latent_input_fake(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    layer_name: LayerNameType,
    hidden_states: torch.Tensor | None,
    index_weight: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    latents = x.new_empty((x.shape[0], q_weight.shape[0]))
    if hidden_states is None or index_weight is None:
        return latents, x.new_empty(0)
    return latents, hidden_states.new_empty((hidden_states.shape[0], index_weight.shape[0]))


@eager_break_during_capture  # type: ignore[untyped-decorator]
@maybe_transfer_kv_layer  # type: ignore[untyped-decorator]
def glm5_attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    output: torch.Tensor,
    values_at_once: bool,
    layer_name: LayerNameType,
) -> None:
    """Attention of q [T, H, N + 64], RoPE not applied yet, over the layer's cache into ``output`` [T, H * V].

    With ``values_at_once`` the product with W_UV is part of attention's own last launch where it can be, and cache rows
    of a new selection are looked up in the launch that prepares the query.
    """
    from glm5deploy.kernels.query_input import query_input

    metadata, attention, cache, _ = get_attention_context(_resolve_layer_name(layer_name))
    if metadata is None:
        output.zero_()
        return
    tokens = metadata.num_actual_tokens
    lookup = attention.impl.look_up(tokens, cache, metadata) if values_at_once else None
    query = query_input(q[:tokens], attention.W_UK_T, positions[:tokens], cos_sin, lookup)
    if values_at_once:
        attention.impl.forward_values(query, cache, metadata, attention.W_UV, output[:tokens])
        return
    out, _ = attention.impl.forward_mqa(query, cache, metadata, attention)
    attention._v_up_proj(out, out=output[:tokens])


def _attention_fake(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    output: torch.Tensor,
    values_at_once: bool,
    layer_name: LayerNameType,
) -> None:
    return None


direct_register_custom_op(
    op_name="glm5_latent_input", op_func=glm5_latent_input, mutates_args=[], fake_impl=_latent_input_fake
)
direct_register_custom_op(
    op_name="glm5_attention", op_func=glm5_attention, mutates_args=["output"], fake_impl=_attention_fake
)
latent_input = torch.ops.vllm.glm5_latent_input
attention = torch.ops.vllm.glm5_attention
