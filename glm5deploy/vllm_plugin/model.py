"""The model classes: vLLM's portable GLM-5 and its MTP draft model, built with our indexer."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.deepseek_mtp import DeepSeekMTP
from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE, GateLinear, GlmMoeDsaForCausalLM

from glm5deploy.glm_dsa.pipeline_parallel import VARIABLE, partition_variable
from glm5deploy.vllm_plugin import DRAFT_ARCHITECTURE, compat, cpu, engine_config
from glm5deploy.vllm_plugin.experts import experts_factory
from glm5deploy.vllm_plugin.indexer import Glm5Indexer
from glm5deploy.vllm_plugin.latent_attention import Glm5LatentAttention
from glm5deploy.vllm_plugin.norms import Glm5Norm
from glm5deploy.vllm_plugin.registration import attention_backend

DRAFT_CLASS = "glm5deploy.vllm_plugin.model:Glm5MTP"


class Fp32GateLinear(GateLinear):
    """The router with fp32 weights, as the files hold them: near ties between experts are decided as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "params_dtype": torch.float32, "out_dtype": torch.float32})

        level = engine_config.fusion(get_current_vllm_config())
        self.own_product = (
            engine_config.reaches(level, "experts")
            and not (cpu.is_cpu() or envs.VLLM_BATCH_INVARIANT)
            and type(self.quant_method) is UnquantizedLinearMethod
            and self.bias is None
        )

    def forward(self, x: torch.Tensor) -> Any:
        """x [T, hidden] -> logits fp32 [T, experts]; a token or two do not wait long enough for vLLM's product."""
        if self.own_product and x.is_cuda and x.is_contiguous():
            from glm5deploy.kernels.row_product import ROUTER_TOKENS, row_product

            if x.shape[0] <= ROUTER_TOKENS:
                return self._return(row_product(x, self.weight))
        return super().forward(x)

    def _register_ll_fp32w_warmup(self) -> None:
        """Before it serves, vLLM 0.33 compiles a router product for every step of up to 32 tokens and activations of
        two types. The model has one type, and half of these 25 seconds need not be spent."""
        compat.warm_router_product(self, torch.get_default_dtype())


class WeightScaledMoE(DeepseekV2MoE):
    """Routed experts whose weights carry the model's scaling factor: the router multiplies it in, without a launch.

    vLLM multiplies the experts' sum with it, except in float16, where it scales all else down so that nothing
    overflows; that stays as it is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        to_output = torch.get_default_dtype() == torch.float16
        super().__init__(*args, **{**kwargs, "apply_routed_scale_to_output": to_output})


PARTS = {
    "Indexer": Glm5Indexer,
    "GateLinear": Fp32GateLinear,
    "DeepseekV2MoE": WeightScaledMoE,
    "FusedMoEFactory": experts_factory,
    "MultiHeadLatentAttentionWrapper": Glm5LatentAttention,
    "RMSNorm": Glm5Norm,
}


class Glm5ForCausalLM(GlmMoeDsaForCausalLM):
    """GLM-5, 5.1, 5.2 and 5.3 with the selection and the attention of this package."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        if vllm_config.speculative_config is not None:
            _prepare_draft(vllm_config.speculative_config)
        if not cpu.is_cpu():
            _chain_launches(vllm_config)
        with compat.portable_model_parts(**PARTS):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        stages = vllm_config.parallel_config.pipeline_parallel_size
        require_own_selection(vllm_config.model_config.hf_text_config, self.model.start_layer, stages)


def _chain_launches(vllm_config: Any) -> None:
    from glm5deploy.kernels import chain  # imports Triton

    chain.allow(engine_config.chained(vllm_config))


def _prepare_draft(speculative_config: Any) -> None:
    """This process serves our model, so the draft is ours too; vLLM builds it after the main model."""
    ModelRegistry.register_model(DRAFT_ARCHITECTURE, DRAFT_CLASS)
    if speculative_config.attention_backend is None:
        speculative_config.attention_backend = attention_backend()


def require_own_selection(config: Any, first_layer: int, stages: int) -> None:
    """Raise ValueError when this pipeline stage begins with a layer that shares a selection made in another process.

    vLLM passes hidden states between stages and not the selected positions: the stage would attend to whatever its own
    buffer holds, without any error.
    """
    pattern = getattr(config, "index_topk_pattern", None) or ""
    if first_layer < len(pattern) and pattern[first_layer] == "S":
        division = partition_variable(pattern, stages)
        remedy = f"Set {VARIABLE}={division} on every node" if division else f"Unset {VARIABLE}"
        raise ValueError(
            f"a pipeline stage begins with layer {first_layer}, which shares the selection of an earlier layer in "
            f"another process: its answers would be wrong. {remedy}"
        )


class Glm5MTP(DeepSeekMTP):
    """The MTP block as a draft model for speculative decoding."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with compat.portable_model_parts(**PARTS):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
