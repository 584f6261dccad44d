"""The launches of experts that fewer launches need and vLLM's own do not."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from glm5deploy.kernels.prepare import Launch
from glm5deploy.quants.token_experts import Choice
from glm5deploy.vllm_plugin import experts_together
from glm5deploy.vllm_plugin.experts import Glm5ExpertsRunner, fused


def launches(dtype: torch.dtype) -> list[Launch]:
    """For activations of ``dtype``; layers of one kind launch the same. First those that take long to compile."""
    kinds: dict[Hashable, Glm5ExpertsRunner] = {}
    for reference in fused:
        runner = reference()
        if runner is not None:
            kinds.setdefault(_kind(runner), runner)
    found = []
    for runner in kinds.values():
        found.append(_sum(runner, dtype))
        if runner.together:
            found.insert(0, _together(runner, dtype))
    return found


def _kind(runner: Glm5ExpertsRunner) -> tuple[Hashable, ...]:
    shared = experts_together.shared_of(runner) if runner.together else None
    types = shared and tuple((part.format.name, part.rows) for part in (*shared.gate_up, shared.down))
    return runner.router.top_k, str(runner.routed_experts.quant_method.parameters.spec), types


def _sum(runner: Glm5ExpertsRunner, dtype: torch.dtype) -> Launch:
    """The sum with what is computed beside, for any number of tokens."""
    experts, topk = runner.routed_experts, runner.router.top_k

    def add() -> None:
        planes = experts.quant_method.parameters.planes(experts)[0]
        device = planes.low.device
        x = torch.zeros((1, planes.columns), dtype=dtype, device=device)
        ids = torch.zeros((1, topk), dtype=torch.int32, device=device)
        experts.quant_method.sum(experts, x, torch.zeros((1, topk), device=device), ids, lambda: x)

    return Launch(("sum", *_kind(runner)), add)


def _together(runner: Glm5ExpertsRunner, dtype: torch.dtype) -> Launch:
    """One token's, with the shared expert."""
    experts, shared = runner.routed_experts, experts_together.shared_of(runner)

    def call() -> None:
        gate = experts.quant_method.parameters.planes(experts)[0]
        bias = torch.zeros(gate.experts, device=gate.low.device)
        x = torch.zeros((1, gate.columns), dtype=dtype, device=gate.low.device)
        experts.quant_method.with_shared(experts, x, shared, Choice(bias[None], bias, runner.router.top_k, 1.0))

    return Launch(("together", *_kind(runner)), call)
