"""The choice of one token's experts as a launch of its own, and logits that make it hard."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm5deploy.quants.one_token_kernel import expert_of_rank, score_of

KINDS = ("random", "tied", "equal", "saturated", "strange")


@triton.jit(do_not_specialize=["FIRST"])
def rank_kernel(
    logits, bias, ids, scores, FIRST, E: tl.constexpr, EX: tl.constexpr, WARPS: tl.constexpr, PTX: tl.constexpr
):
    rank = tl.program_id(0)
    expert = expert_of_rank(logits, bias, rank, FIRST, E, EX, WARPS, PTX, False)
    tl.store(ids + rank, expert)
    tl.store(scores + rank, score_of(tl.load(logits + expert), PTX))


def choose(logits: torch.Tensor, bias: torch.Tensor, topk: int, warps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and scores [topk] by logits [1, E] and bias [E]."""
    experts = logits.shape[1]
    ids = torch.empty(topk, dtype=torch.int32, device=logits.device)
    scores = torch.empty(topk, device=logits.device)
    most = max(32, triton.next_power_of_2(experts))
    rank_kernel[(topk,)](
        logits, bias, ids, scores, 0, E=experts, EX=most, WARPS=warps, PTX=logits.is_cuda, num_warps=warps
    )
    return ids, scores


def logits_of(kind: str, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, E] and bias [E]: with equal ones, with sigmoids that are 1 or 0, with NaN and infinities."""
    g = torch.Generator().manual_seed(experts + seed)
    logits, bias = torch.randn(1, experts, generator=g), torch.rand(experts, generator=g)
    if kind == "tied":
        return torch.randint(-1, 2, (1, experts), generator=g).float(), (bias * 2).round() / 4
    if kind == "equal":
        return torch.zeros(1, experts), torch.zeros(experts)
    if kind == "saturated":
        return logits * 80, torch.zeros(experts)
    if kind == "strange":
        logits[0, ::7], logits[0, 3], logits[0, 5], bias[11] = float("inf"), float("nan"), float("-inf"), -2.5
        logits[0, -2], bias[2], bias[-1] = float("nan"), float("inf"), float("-inf")
    return logits, bias
