"""The model class: vLLM's portable GLM-5, built with our indexer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.deepseek_v2 import GateLinear, GlmMoeDsaForCausalLM

from glm5deploy.vllm_plugin import compat
from glm5deploy.vllm_plugin.indexer import Glm5Indexer


class Fp32GateLinear(GateLinear):
    """The router with fp32 weights, as the files hold them: near ties between experts are decided as there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"params_dtype": torch.float32, **kwargs})


class Glm5ForCausalLM(GlmMoeDsaForCausalLM):
    """GLM-5, 5.1, 5.2 and 5.3 with the selection and the attention of this package."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        with compat.portable_model_parts(Indexer=Glm5Indexer, GateLinear=Fp32GateLinear):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
