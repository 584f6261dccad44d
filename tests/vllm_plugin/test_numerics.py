"""What the comparison before serving takes for a tie where a GPU multiplies e4m3 numbers as they are."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.kernels.reference import quantise_fp8
from glm5deploy.vllm_plugin import numerics

BITS = 13  # that SM90's tensor cores keep below the largest of a step's products
STEP = 32  # products a step


def sm90_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q [J, 128], k [S, 128], e4m3 values -> [J, S]: each step's products and the sum so far, cut off at one place."""
    total = torch.zeros(len(q), len(k), dtype=torch.float64)
    for at in range(0, q.shape[1], STEP):
        products = q[:, None, at : at + STEP] * k[None, :, at : at + STEP]
        terms = torch.cat((products, total[..., None]), dim=-1)
        unit = torch.exp2(terms.abs().amax(-1, keepdim=True).log2().floor() - BITS)
        total = (torch.trunc(terms / unit) * unit).sum(-1)
    return total


def selections(case: numerics.Case) -> torch.Tensor:
    """Each token's best positions by scores as SM90 computes them."""
    keys, key_scale = quantise_fp8(case.keys)
    queries, query_scale = quantise_fp8(case.q_index)
    rows = []
    for row, (q, w) in enumerate(zip(queries.double(), case.weights.double() * query_scale.double(), strict=True)):
        seen = numerics.seen_positions(case, row)
        products = sm90_scores(q, keys[seen].double()).clamp(min=0)
        scores = (w[:, None] * products).sum(dim=0) * key_scale[seen].double()
        rows.append(scores.topk(numerics.TOPK).indices.int())
    return torch.stack(rows)


def test_sm90s_sums_of_e4m3_products_are_ties_and_a_swapped_position_is_not() -> None:
    case = numerics.make_case(torch.device("cpu"), torch.bfloat16, numerics.DECODES[1])
    selected = selections(case)
    assert numerics.selection_errors(case, selected, numerics.TIE_E4M3) == 0
    # What an H200 did: the last of nine rows swaps two positions whose scores are 3e-4 of the spread apart.
    assert numerics.selection_errors(case, selected, numerics.TIE) == 1
    wrong = selected.clone()
    for row in wrong:
        row[-1] = next(position for position in range(numerics.CONTEXTS[0]) if position not in row.tolist())
    assert numerics.selection_errors(case, wrong, numerics.TIE_E4M3) == len(wrong)


def test_scratch_memory_is_found_without_the_gpus_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM names a platform's device so; tensors have the number."""
    from glm5deploy.vllm_plugin import device

    held = object()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(device, "_scratch", {torch.device("cuda", 3): held})
    assert device.scratch(torch.device("cuda")) is held
    assert device.scratch(torch.device("cuda", 3)) is held
    with pytest.raises(KeyError):
        device.scratch(torch.device("cuda", 1))
