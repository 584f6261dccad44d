"""Every launch around routed experts that fewer launches need and vLLM's own do not."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import torch

from glm5deploy.kernels.prepare import Launch, first_of_each
from glm5deploy.quants import router
from glm5deploy.vllm_plugin.experts import Glm5ExpertsRunner, fused


def launches(max_tokens: int, dtype: torch.dtype) -> list[Launch]:
    """For activations of ``dtype`` and steps of 1 to ``max_tokens`` tokens; layers of one kind launch the same."""
    kinds: dict[Hashable, Glm5ExpertsRunner] = {}
    for reference in fused:
        runner = reference()
        if runner is not None:
            kinds.setdefault((runner.gate.weight.shape, runner.router.top_k, _spec(runner)), runner)
    return [launch for runner in kinds.values() for launch in _of_runner(runner, max_tokens, dtype)]


def _spec(runner: Glm5ExpertsRunner) -> str:
    return str(runner.routed_experts.quant_method.parameters.spec)


def _of_runner(runner: Glm5ExpertsRunner, max_tokens: int, dtype: torch.dtype) -> Iterator[Launch]:
    weight, topk = runner.gate.weight, runner.router.top_k

    def tokens(count: int) -> torch.Tensor:
        return torch.zeros((count, weight.shape[1]), dtype=dtype, device=weight.device)

    def choose(count: int) -> None:
        runner.select(tokens(count))

    def add() -> None:
        ids = torch.zeros((1, topk), dtype=torch.int32, device=weight.device)
        weights = torch.zeros((1, topk), device=weight.device)
        experts = runner.routed_experts
        experts.quant_method.sum(experts, tokens(1), weights, ids, lambda: tokens(1))

    for count in first_of_each(router.router_key, range(1, min(max_tokens, router.MOST_TOKENS) + 1)):
        yield Launch(("router", weight.shape, topk, router.router_key(count)), partial(choose, count))
    yield Launch(("sum", _spec(runner)), add)
