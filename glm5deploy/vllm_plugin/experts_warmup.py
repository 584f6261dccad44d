"""The launch behind routed experts that fewer launches need and vLLM's own do not."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from glm5deploy.kernels.prepare import Launch
from glm5deploy.vllm_plugin.experts import Glm5ExpertsRunner, fused


def launches(dtype: torch.dtype) -> list[Launch]:
    """For activations of ``dtype``; layers of one kind launch the same, for any number of tokens."""
    kinds: dict[Hashable, Glm5ExpertsRunner] = {}
    for reference in fused:
        runner = reference()
        if runner is not None:
            kinds.setdefault((runner.router.top_k, _spec(runner)), runner)
    return [_of_runner(runner, dtype) for runner in kinds.values()]


def _spec(runner: Glm5ExpertsRunner) -> str:
    return str(runner.routed_experts.quant_method.parameters.spec)


def _of_runner(runner: Glm5ExpertsRunner, dtype: torch.dtype) -> Launch:
    experts, topk = runner.routed_experts, runner.router.top_k

    def add() -> None:
        planes = experts.quant_method.parameters.planes(experts)[0]
        device = planes.low.device
        x = torch.zeros((1, planes.columns), dtype=dtype, device=device)
        ids = torch.zeros((1, topk), dtype=torch.int32, device=device)
        experts.quant_method.sum(experts, x, torch.zeros((1, topk), device=device), ids, lambda: x)

    return Launch(("sum", _spec(runner)), add)
