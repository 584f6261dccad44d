"""vLLM's norm between two parts of a layer, which first adds what the part in front gave to the residual.

With ``glm5_fusion`` at ``norms`` rows of the model's width are added and normed by a kernel of this package, up to
:data:`glm5deploy.kernels.add_norm.MOST_TOKENS` of them, rounded where vLLM's kernel rounds. It is vLLM's layer in all
else, and more tokens, the CPU engine, torch.compile, and a vLLM whose code is another one run vLLM's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm

from glm5deploy.vllm_plugin import cpu, engine_config, replaced

logger = init_logger("vllm.glm5deploy")


class Glm5Norm(RMSNorm):
    """One norm; parameters and constructor are vLLM's, which calls ``forward_cuda`` where its own kernels would run."""

    def __init__(self, hidden_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(hidden_size, *args, **kwargs)
        config = get_current_vllm_config()
        of_rows = engine_config.reaches(engine_config.fusion(config), "norms") and not cpu.is_cpu()
        # Latents are normed elsewhere; where they are not, nothing is prepared for their widths.
        self.fused = of_rows and hidden_size == config.model_config.get_hidden_size()
        obstacle = why_not(self, config) if self.fused else None
        if obstacle:
            logger.warning_once("vLLM's own norms run between parts of a layer: %s", obstacle)
            self.fused = False

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x and residual [T, hidden] -> the normed sum, and the sum where a residual was given."""
        from glm5deploy.kernels.add_norm import MOST_TOKENS, add_norm

        inputs = (x,) if residual is None else (x, residual)
        if not self.fused or x.dim() != 2 or x.shape[0] > MOST_TOKENS or not all(t.is_contiguous() for t in inputs):
            return super().forward_cuda(x, residual)  # type: ignore[no-any-return]
        normed, total = add_norm(x, residual, self.weight.data, self.variance_epsilon)
        return normed if residual is None else (normed, total)


def why_not(norm: Any, config: Any) -> str | None:
    """What keeps the kernel from standing in for vLLM's in a norm that it has built, or None."""
    unknown = replaced.obstacle("norms")
    if unknown:
        return unknown
    chosen = config.kernel_config.ir_op_priority
    checks = {
        "norms are of another kind": norm.has_weight
        and norm.variance_size_override is None
        and norm.weight.dtype == torch.get_default_dtype(),
        "vLLM computes them with other kernels": all(
            names[:1] == ["vllm_c"] for names in (chosen.rms_norm, chosen.fused_add_rms_norm)
        ),
        "answers are not to depend on the batch": not envs.VLLM_BATCH_INVARIANT,
    }
    return replaced.first(checks)
