"""Experts of few tokens, the shared one among them, in three launches; one token's experts are chosen in the first."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton

from glm5deploy.kernels.chain import chained
from glm5deploy.quants import launch, products
from glm5deploy.quants.arguments import kernel_format, pointers, row_stride
from glm5deploy.quants.counters import part_memory
from glm5deploy.quants.few_tokens_kernel import few_down_kernel, few_gate_up_kernel
from glm5deploy.quants.moe_kernel import sum_kernel
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.token_experts import Choice, Chosen, Shared

Configs = tuple[launch.Launch, launch.Launch]


def _configs(tokens: int, topk: int, gate: Planes, down: Planes, device: torch.device) -> Configs:
    return launch.few_launch(tokens, topk, gate.rows, gate.supers, down.rows, products._gpu(device).processors)


def key(tokens: int, gate: Planes, up: Planes, down: Planes, topk: int, device: torch.device) -> Hashable:
    """What of ``few`` depends on the number of tokens and chooses a compiled variant."""
    a, b = _configs(tokens, topk, gate, down, device)
    return a.variant, b.variant, tokens == 1


def few(
    x: torch.Tensor,
    gate: Planes,
    up: Planes,
    down: Planes,
    shared: Shared,
    chosen: Choice | Chosen,
    out: torch.Tensor | None = None,
    configs: Configs | None = None,
    ahead: int = 0,
) -> torch.Tensor:
    """The shared expert's down(silu(gate x) * up x) and each token's experts', weighted, summed: [T, hidden] as x.

    As ``moe``, for at most :data:`launch.FEW_TOKENS` tokens and a shared expert that fits; a Choice is one token's.
    The sum begins with the shared expert, and no term of it is rounded. ``ahead`` asks for the second product's weights
    in the first: 0 never, 1 as soon as a program knows its expert, 2 once it has multiplied.
    """
    tokens, topk = x.shape[0], chosen.topk if isinstance(chosen, Choice) else chosen[0].shape[1]
    if not (0 < tokens <= launch.FEW_TOKENS and shared.fits(gate, up, down) and x.shape[1] == gate.columns):
        raise ValueError(f"x of shape {tuple(x.shape)} and a shared expert do not fit experts of {gate.rows} units")
    a, b = configs or _configs(tokens, topk, gate, down, x.device)
    pairs, n = tokens * topk, gate.rows
    if out is None:
        out = torch.empty((tokens, down.rows), dtype=x.dtype, device=x.device)
    ids, weights, choice = _chosen(chosen, tokens, gate, x.device)
    blocks = triton.cdiv(n, a.bn)
    search = 1 if tokens == 1 else launch.SEARCH_PAIRS
    hidden = torch.empty((pairs + tokens, n), dtype=x.dtype, device=x.device)
    parts, tickets = part_memory(a.parts, pairs + tokens, 2 * n, (pairs + 1) * blocks, x.device)
    first, last = shared.gate_up[0], shared.gate_up[-1]
    few_gate_up_kernel[(blocks, 1 + pairs, a.parts)](
        x, *pointers(gate), *pointers(up), *pointers(first), *pointers(last), ids, weights,
        choice.logits if choice else weights, choice.bias if choice else weights, *pointers(down),
        *pointers(shared.down), hidden, parts, tickets, pairs, tokens, 0, n, first.rows, first.rows - n, gate.columns,
        row_stride(x), gate.supers, a.parts, *_plane_bytes(down), *_plane_bytes(shared.down), AHEAD=ahead,
        G=kernel_format(gate.format), U=kernel_format(up.format), A=kernel_format(first.format),
        B=kernel_format(last.format), TOPK=topk, E=gate.experts if choice else 0,
        EX=max(32, triton.next_power_of_2(gate.experts)), WARPS=a.warps, BN=a.bn, BM=a.bm, PAIRS=search,
        STAGES=a.stages, EVEN=gate.columns % 256 == 0, PTX=x.dtype == torch.bfloat16, **a.options,
        **chained(x.device),
    )  # fmt: skip
    terms = torch.empty((pairs + tokens, down.rows), dtype=torch.float32, device=x.device)
    few_down_kernel[(triton.cdiv(down.rows, b.bn * b.tiles), 1 + pairs)](
        hidden, *pointers(down), *pointers(shared.down), ids, weights, terms, choice.scale if choice else 1.0,
        pairs, tokens, down.rows, n, down.supers, b.tiles, FMT=kernel_format(down.format),
        A=kernel_format(shared.down.format), TOPK=topk, SCORES=triton.next_power_of_2(topk) if choice else 0,
        BN=b.bn, BM=b.bm, PAIRS=search, STAGES=b.stages, ONE=down.supers == 1, EVEN=n % 256 == 0,
        PTX=x.dtype == torch.bfloat16, **b.options, **chained(x.device),
    )  # fmt: skip
    span = products.SUM_SPAN
    sum_kernel[(tokens, triton.cdiv(down.rows, span))](
        terms, ids, terms[pairs:], out, down.rows, TOPK=topk, BN=span, ALSO=True, num_warps=4, **chained(x.device)
    )  # fmt: skip
    return out


def _plane_bytes(planes: Planes) -> list[int]:
    """Of one expert."""
    return [0 if t is None else t[0].nbytes for t in (planes.low, planes.high, planes.words, planes.halves)]


def _chosen(
    chosen: Choice | Chosen, tokens: int, gate: Planes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Choice | None]:
    """ids int32 and weights fp32 [T, TOPK]; where they are still to be chosen, memory for them."""
    if not isinstance(chosen, Choice):
        ids, weights = chosen
        return ids.contiguous(), weights.contiguous(), None
    if tokens != 1:
        raise ValueError(f"{tokens} tokens' experts are to be chosen beforehand")
    chosen.check(tokens, gate.experts)
    ids = torch.empty((1, chosen.topk), dtype=torch.int32, device=device)
    weights = torch.empty((1, chosen.topk), dtype=torch.float32, device=device)
    return ids, weights, chosen._replace(logits=chosen.logits.contiguous(), bias=chosen.bias.contiguous())
