"""When one token's experts take the shared expert into their launches, and are chosen there.

Then a decoded token's layer of experts is the router's product and three launches. What keeps it from that is said
here: an expert of another shape than the routed ones' (expert parallelism), weights that are not ours, another router.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MLP

from glm5deploy.quants.token_experts import Choice, Shared
from glm5deploy.vllm_plugin import replaced
from glm5deploy.vllm_plugin.quantised_linear import Glm5LinearMethod


def obstacle(runner: Any) -> str | None:
    """What keeps experts that vLLM has built from these launches, or None."""
    return shared_obstacle(runner) or choice_obstacle(runner)


def shared_obstacle(runner: Any) -> str | None:
    """What keeps the shared expert from the routed ones' launches, or None."""
    layer, routed = runner._shared_experts._layer, runner.routed_experts
    unknown = replaced.obstacle("shared")
    if unknown:
        return unknown
    if type(layer) is not DeepseekV2MLP or type(layer.act_fn) is not SiluAndMul:
        return "the shared expert is of another kind"
    parts = layer.gate_up_proj, layer.down_proj
    found = replaced.first(
        {
            "the shared expert's weights are not ours": {type(p.quant_method) for p in parts} == {Glm5LinearMethod},
            "the shared expert has a bias": all(part.bias is None for part in parts),
            "the shared expert is summed on its own": not layer.down_proj.reduce_results,
            "experts are dealt out to ranks": routed.expert_map is None,
        }
    )
    if found is None and not shared_of(runner).fits(*routed.quant_method.parameters.planes(routed)):
        return "the shared expert has another shape than routed ones"
    return found


def shared_of(runner: Any) -> Shared:
    """The weights of the shared expert."""
    layer = runner._shared_experts._layer
    planes = [part.quant_method.parameters.planes(part) for part in (layer.gate_up_proj, layer.down_proj)]
    return Shared(tuple(planes[0]), planes[1][0])


def choice_obstacle(runner: Any) -> str | None:
    """What keeps experts from being chosen in their own launches, or None."""
    router, gate, unknown = runner.router, runner.gate, replaced.obstacle("choice")
    if unknown:
        return unknown
    if type(router) is not GroupedTopKRouter:
        return f"experts are chosen by {type(router).__name__}"
    bias = router.e_score_correction_bias
    return replaced.first(
        {
            "experts are chosen by groups": (router.num_expert_group, router.topk_group) == (1, 1),
            "experts are not chosen by sigmoids": router.scoring_func == "sigmoid",
            "experts' weights are no shares": bool(router.renormalize),
            "experts have no bias in fp32": bias is not None
            and (bias.dtype, bias.shape) == (torch.float32, (router.global_num_experts,)),
            "the router's logits are not fp32": gate.out_dtype == torch.float32,
            "the router chooses shared experts": router.num_fused_shared_experts == 0,
            "the router leaves out padding": not router.skip_padding,
            "experts are dealt out to ranks": runner.routed_experts.expert_map is None,
            "vLLM's own kernel does not choose": bool(envs.VLLM_USE_FUSED_MOE_GROUPED_TOPK),
        }
    )


def watched(router: Any) -> bool:
    """Whether someone records which experts are chosen."""
    return router.capture_fn is not None or router._routing_replay_out is not None


def choice_of(runner: Any, x: torch.Tensor) -> Choice:
    """What experts of x's tokens are chosen by."""
    router = runner.router
    logits, _ = runner.gate(x)
    return Choice(logits, router.e_score_correction_bias.data, router.top_k, float(router.routed_scaling_factor))
