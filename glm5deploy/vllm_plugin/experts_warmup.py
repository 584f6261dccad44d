"""The launches of experts that fewer launches need and vLLM's own do not."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial

import torch

from glm5deploy.kernels.prepare import Launch, first_of_each
from glm5deploy.quants import few_tokens
from glm5deploy.quants.launch import FEW_TOKENS
from glm5deploy.quants.token_experts import Choice, Chosen
from glm5deploy.vllm_plugin import few_experts
from glm5deploy.vllm_plugin.experts import Glm5ExpertsRunner, fused


def launches(dtype: torch.dtype) -> list[Launch]:
    """For activations of ``dtype``; layers of one kind launch the same."""
    kinds: dict[Hashable, Glm5ExpertsRunner] = {}
    for reference in fused:
        runner = reference()
        if runner is not None:
            kinds.setdefault(_kind(runner), runner)
    found = []
    for runner in kinds.values():
        found.append(_sum(runner, dtype))
        if runner.slot:
            found += _few(runner, dtype)
    return found


def _kind(runner: Glm5ExpertsRunner) -> tuple[Hashable, ...]:
    shared = few_experts.shared_of(runner) if runner.slot else None
    types = shared and tuple((part.format.name, part.rows) for part in (*shared.gate_up, shared.down))
    return runner.router.top_k, str(runner.routed_experts.quant_method.parameters.spec), types, runner.chooses


def _sum(runner: Glm5ExpertsRunner, dtype: torch.dtype) -> Launch:
    """The sum with what is computed beside, for any number of tokens."""
    experts, topk = runner.routed_experts, runner.router.top_k

    def add() -> None:
        planes = experts.quant_method.parameters.planes(experts)[0]
        device = planes.low.device
        x = torch.zeros((1, planes.columns), dtype=dtype, device=device)
        experts.quant_method.sum(experts, x, *reversed(_given(1, topk, device)), lambda: x)

    return Launch(("sum", *_kind(runner)), add)


def _few(runner: Glm5ExpertsRunner, dtype: torch.dtype) -> Iterator[Launch]:
    """Few tokens, one after the other of their numbers for which other kernels are compiled."""
    experts, topk, shared = runner.routed_experts, runner.router.top_k, few_experts.shared_of(runner)
    gate, up, down = experts.quant_method.parameters.planes(experts)
    device = gate.low.device

    def key(tokens: int) -> Hashable:
        return few_tokens.key(tokens, gate, up, down, topk, device)

    def call(tokens: int) -> None:
        x = torch.zeros((tokens, gate.columns), dtype=dtype, device=device)
        chosen: Choice | Chosen = _given(tokens, topk, device)
        if tokens == 1 and runner.chooses:
            bias = torch.zeros(gate.experts, device=device)
            chosen = Choice(bias[None], bias, topk, 1.0)
        experts.quant_method.with_shared(experts, x, shared, chosen)

    for tokens in first_of_each(key, range(1, FEW_TOKENS + 1)):
        yield Launch(("few", *_kind(runner), key(tokens)), partial(call, tokens))


def _given(tokens: int, topk: int, device: torch.device) -> Chosen:
    return (
        torch.zeros((tokens, topk), dtype=torch.int32, device=device),
        torch.zeros((tokens, topk), device=device),
    )
