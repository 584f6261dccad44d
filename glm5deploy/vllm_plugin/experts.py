"""vLLM's runner of routed experts with fewer launches for few tokens.

For a decoded token vLLM launches the experts' products and their sum, and, once the shared expert has been computed
beside all of these, the addition of both. With ``glm5_fusion`` at ``experts`` the addition is part of the sum, up to
:data:`MOST_TOKENS` tokens: the shared expert's stream is joined before that sum instead of behind it. For one token the
shared expert is one more of the products' experts, which the first product chooses, where experts_together.py finds
nothing against it. Routing otherwise, and what follows, such as the sum over ranks, stay vLLM's. More tokens, the CPU
engine, and a vLLM whose code is not the one that is replaced here, run vLLM's own.
"""

# No `from __future__ import annotations` here: torch derives the operations' schemas from annotations that are objects.
import weakref
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner, get_layer_from_name
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.models import deepseek_v2
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from glm5deploy.vllm_plugin import cpu, engine_config, experts_together, replaced
from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod

logger = init_logger("vllm.glm5deploy")

MOST_TOKENS = 32  # whose shared expert is added in the sum
_factory = deepseek_v2.FusedMoEFactory
fused: list[weakref.ref["Glm5ExpertsRunner"]] = []
"""Runners with fewer launches, kept as long as their model is."""


class Glm5ExpertsRunner(MoERunner):
    """The experts of one layer; parameters and constructor are vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wanted = engine_config.reaches(engine_config.fusion(get_current_vllm_config()), "experts")
        self.fused = wanted and not cpu.is_cpu()
        obstacle = why_not(self) if self.fused else None
        if obstacle:
            logger.warning_once("vLLM's own operations run around routed experts: %s", obstacle)
            self.fused = False
        obstacle = experts_together.obstacle(self) if self.fused else None
        if obstacle:
            logger.info_once("One token's shared expert and router have launches of their own: %s", obstacle)
        self.together = self.fused and obstacle is None
        if self.fused:
            fused.append(weakref.ref(self))

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states [T, hidden] -> [T, hidden]: routed and shared experts, summed over ranks."""
        if not self.fused or input_ids is not None or shared_experts_input is not None:
            return super().forward(hidden_states, router_logits, input_ids, shared_experts_input)  # type: ignore[no-any-return]
        out = torch.ops.vllm.glm5_experts(hidden_states, self._encode_layer_name())
        return self._maybe_reduce_final_output(out, None, False)  # type: ignore[no-any-return]

    def of_this_rank(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of routed and shared experts' sum, [T, hidden] in x's type."""
        if not 0 < x.shape[0] <= MOST_TOKENS:
            beside, routed = self._forward_impl(x, x, x, None)
            return beside + routed  # type: ignore[no-any-return]
        method: Glm5MoeMethod = self.routed_experts.quant_method
        if self.together and x.shape[0] == 1 and not experts_together.watched(self.router):
            choice = experts_together.choice_of(self, x)
            return method.with_shared(self.routed_experts, x, experts_together.shared_of(self), choice)
        shared = self._shared_experts
        apart = shared.maybe_forward_async(x)
        logits, _ = self.gate(x)
        weights, ids = self.router.select_experts(x, logits, self._quant_method.topk_indices_dtype)
        if not apart:
            shared(x, SharedExpertsOrder.NO_OVERLAP)

        def shared_output() -> torch.Tensor:
            if apart:
                shared.wait()
            return shared.output  # type: ignore[no-any-return]

        return method.sum(self.routed_experts, x, weights, ids, shared_output)


def why_not(runner: Any) -> str | None:
    """What keeps fewer launches from standing in for vLLM's around experts that it has built, or None."""
    unknown = replaced.obstacle("experts")
    if unknown:
        return unknown
    config = runner.moe_config
    checks = {
        "experts are not of our kind": type(runner.routed_experts.quant_method) is Glm5MoeMethod,
        "experts are chosen elsewhere": runner.gate is not None,
        "experts are moved while serving": runner.router.eplb_state is None,
        "there is no shared expert of its own": runner._shared_experts is not None
        and runner.shared_expert_gate is None,
        "what experts take or give is changed": runner.routed_scaling_factor == 1.0
        and runner.routed_input_transform is None
        and runner.routed_output_transform is None,
        "steps are divided between ranks": config.dp_size == config.pcp_size == 1
        and not config.is_sequence_parallel
        and not config.is_lora_enabled
        and not runner.enable_dbo,
        "answers are not to depend on the batch": not envs.VLLM_BATCH_INVARIANT,
    }
    return replaced.first(checks)


def experts_factory(*args: Any, **kwargs: Any) -> MoERunner:
    """vLLM's factory of routed experts, with our runner."""
    return _factory(*args, **{**kwargs, "runner_cls": Glm5ExpertsRunner})


def glm5_experts(hidden_states: torch.Tensor, layer_name: LayerNameType) -> torch.Tensor:
    """Routed and shared experts of a layer, this rank's part: [T, hidden]."""
    runner = get_layer_from_name(_resolve_layer_name(layer_name))
    return runner.of_this_rank(hidden_states)  # type: ignore[no-any-return]


def _experts_fake(hidden_states: torch.Tensor, layer_name: LayerNameType) -> torch.Tensor:
    return torch.empty_like(hidden_states)


direct_register_custom_op(op_name="glm5_experts", op_func=glm5_experts, mutates_args=[], fake_impl=_experts_fake)
