"""vLLM's top-k operations: how they are called, and what they choose where scores tie or crowd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from glm5deploy.kernels import reference

SPACE_BYTES = 1 << 20
# What an operation of another library may raise when it is missing, called wrongly, or fails on the GPU.
FAILURES = (ImportError, AttributeError, TypeError, ValueError, AssertionError, RuntimeError)
Choose = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], object]


def reason(error: Exception) -> str:
    """The first line of what went wrong, with its kind."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:150]}"


def vllm_ops() -> Any:
    """vLLM's compiled operations, or None."""
    try:
        from vllm import _custom_ops

        if not hasattr(torch.ops._C, "top_k_per_row_prefill"):
            raise ImportError("the operation top_k_per_row_prefill is missing")
    except ImportError as error:
        print(f"vLLM's top-k is not here: {error}")
        return None
    return _custom_ops


def decode_choice(name: str) -> Choose:
    """cooperative_topk or persistent_topk as (scores [T, S], lengths [T], out [T, K], longest)."""
    operation = getattr(torch.ops._C, name)
    space = torch.empty(SPACE_BYTES, dtype=torch.uint8, device="cuda")

    def choose(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, longest: int) -> object:
        return operation(scores, lengths[:, None], out, space, out.shape[1], longest)

    return choose


def prefill_choice(ops: Any, rows: int) -> Choose:
    """top_k_per_row_prefill in the same form, for so many rows; all begin at column 0."""
    starts = torch.zeros(rows, dtype=torch.int32, device="cuda")

    def choose(scores: torch.Tensor, lengths: torch.Tensor, out: torch.Tensor, longest: int) -> object:
        rest = (scores.shape[0], scores.stride(0), scores.stride(1), out.shape[1])
        return ops.top_k_per_row_prefill(scores, starts, lengths, out, *rest)

    return choose


def awkward_scores(width: int) -> dict[str, torch.Tensor]:
    """Rows [4, width] in which many scores are equal, or so near to each other that 16 bits do not tell them apart."""
    normal = torch.randn(4, width, device="cuda")
    position = torch.arange(width, device="cuda", dtype=torch.float32).expand(4, width)
    return {
        "normal": normal,
        "multiples of 1/4": (normal * 4).round() / 4,
        "two values": (normal > 1.9).float(),
        "all equal": torch.full_like(normal, 0.25),
        "1 to 1.001": 1.0 + torch.rand_like(normal) * 1e-3,
        "ascending": (position / width).contiguous(),
        "mostly -inf": torch.where(position < 1000, normal, -torch.inf),
        "0 and -0": torch.where(normal > 0, 0.0, -0.0),
    }


def verdict(scores: torch.Tensor, lengths: torch.Tensor, chosen: torch.Tensor) -> str:
    """How a choice [T, K] differs from the reference's: not at all, in which of equal scores it took, or in scores."""
    expected = reference.select_topk(scores, lengths, chosen.shape[1])
    ours, theirs = expected.sort(dim=1).values, chosen.int().sort(dim=1).values
    if torch.equal(ours, theirs):
        return "same"

    def values(positions: torch.Tensor) -> torch.Tensor:
        valid = (positions >= 0) & (positions < lengths[:, None])
        found = scores.gather(1, positions.clamp(0, scores.shape[1] - 1).long())
        return found.masked_fill(~valid, torch.nan).sort(dim=1).values

    repeated = ((theirs[:, 1:] == theirs[:, :-1]) & (theirs[:, 1:] >= 0)).any()
    if not repeated and torch.equal(values(ours).nan_to_num(7e33), values(theirs).nan_to_num(7e33)):
        return "other ties"
    differ = sum(
        len(set(row.tolist()) - set(other.tolist())) for row, other in zip(expected.cpu(), chosen.cpu(), strict=True)
    )
    return f"WRONG ({differ} of {expected.numel()})"


def compare(ops: Any, k: int) -> None:
    """Print, for each operation and kind of row, whether it chooses what the reference does, twice the same."""
    choices = {name: partial(decode_choice, name) for name in ("cooperative_topk", "persistent_topk")}
    choices["top_k_per_row_prefill"] = partial(prefill_choice, ops, 4)
    for name, make in choices.items():
        for width in (8192, 32768, 131072):
            try:
                print(f"{name} {width}: {_compared(make(), width, k)}", flush=True)
            except FAILURES as error:
                print(f"{name} {width}: failed, {reason(error)}", flush=True)


def _compared(choose: Choose, width: int, k: int) -> str:
    lengths = torch.tensor([width, width - 1, width // 2 + 3, 2049], dtype=torch.int32, device="cuda")
    found: dict[str, list[str]] = {}
    for kind, scores in awkward_scores(width).items():
        outs = [torch.full((4, k), -1, dtype=torch.int32, device="cuda") for _ in range(2)]
        for out in outs:
            choose(scores, lengths, out, width)
        twice = torch.equal(outs[0].sort(dim=1).values, outs[1].sort(dim=1).values)
        result = verdict(scores, lengths, outs[0]) + ("" if twice else ", CHANGES")
        found.setdefault(result, []).append(kind)
    return "; ".join(f"{result}: {', '.join(kinds)}" for result, kinds in found.items())
