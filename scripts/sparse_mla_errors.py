"""Errors of sparse MLA against fp32, over contexts around and beyond K; what of them is the packed cache's own.

The inputs are the same on every machine, so that the cache's own error can be computed without a GPU:

    python scripts/sparse_mla_errors.py

For each context: with what the writer stores, the whole figure and the least and largest of four tokens each; and with
the best of 128 scales a group, which is what the layout allows (4096 leave 0.03 % less). Six minutes on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from glm5deploy.kernels import reference
from glm5deploy.kernels.layout import LATENT_DIM, QK_DIM
from glm5deploy.kernels.measure import relative_rms
from tests.kernels.latent_scales import best_held

K = 2048
SCALE = (192 + 64) ** -0.5
CONTEXTS = (2047, 2048, 2049, 4096, 8192, 32768, 131072)
HEADS = 8
# Of four tokens a few rows with large weights decide: the packed cache's figure is 2.5e-2 to 3.7e-2 then.
TOKENS, FEW = 64, 4
KERNEL_LIMIT, PACKED_LIMIT = 5e-3, 3e-2
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """Queries [TOKENS, HEADS, 576], rows [context + 64, 576] bf16 of which the last 64 are NaN, slots [TOKENS, K]."""

    q: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor

    def attend(self, rows: torch.Tensor) -> torch.Tensor:
        """fp32 attention over these rows."""
        return reference.sparse_mla(self.q, rows, self.slots, SCALE)[0]


def inputs(context: int, device: str) -> Inputs:
    generator = torch.Generator().manual_seed(context)
    rows = torch.randn(context + 64, QK_DIM, generator=generator).bfloat16()
    rows[context:] = torch.nan
    q = torch.randn(TOKENS, HEADS, QK_DIM, generator=generator).bfloat16()
    slots = torch.full((TOKENS, K), -1, dtype=torch.int32)
    for token in slots:
        chosen = torch.randperm(context, generator=generator)[:K]
        token[: len(chosen)] = chosen.int()
    return Inputs(q.to(device), rows.to(device), slots.to(device))


def by_few(value: torch.Tensor, exact: torch.Tensor) -> list[float]:
    """The error of every FEW tokens."""
    return [relative_rms(*part) for part in zip(value.split(FEW), exact.split(FEW), strict=True)]


def worse(*errors: float) -> float:
    """The largest; NaN counts as infinite."""
    return max(error if error == error else float("inf") for error in errors)


def check(ours: Attend, found: dict[str, Attend]) -> tuple[bool, list[str]]:
    """Whether our kernels are right, and what to say about each limit at the end.

    Ours attends to all tokens at once and to a few, which is another launch; the larger error counts. Of the packed
    cache: the kernel's error against what the cache holds, and the error with the cache's own rounding.
    """
    names = ("bf16 cache against fp32", "packed cache against what it holds", "packed cache against fp32")
    limits = (KERNEL_LIMIT, KERNEL_LIMIT, PACKED_LIMIT)
    worst = [0.0] * 3
    print("context  ours bf16  ours fp8  with its rounding     of 4 tokens " + "".join(f"{n:>10}" for n in found))
    for context in CONTEXTS:
        case = inputs(context, "cuda")
        exact = case.attend(case.rows)
        packed = reference.pack_fp8_ds_mla(case.rows)
        held = case.attend(reference.unpack_fp8_ds_mla(packed))

        def both(rows: torch.Tensor, expected: torch.Tensor, case: Inputs = case) -> tuple[torch.Tensor, float]:
            out, few = ours(case.q, rows, case.slots), ours(case.q[:FEW], rows, case.slots[:FEW])
            return out, worse(relative_rms(out, expected), relative_rms(few, expected[:FEW]))

        _, plain_error = both(case.rows, exact)
        out, packed_error = both(packed, held)
        rounding, parts = relative_rms(out, exact), by_few(out, exact)
        padded = torch.nn.functional.pad(case.q, (0, 0, 0, 64 - HEADS))
        clean = case.rows.nan_to_num(0.0)
        theirs = [relative_rms(attend(padded, clean, case.slots)[:, :HEADS], exact) for attend in found.values()]
        worst = [worse(*pair) for pair in zip(worst, (plain_error, packed_error, rounding), strict=True)]
        line = (
            f"{context:7}  {plain_error:.2e}  {packed_error:.2e}  {rounding:.2e}  {min(parts):.2e} to {max(parts):.2e}"
        )
        print(line + "".join(f"{e:10.2e}" for e in theirs), flush=True)
    met = [error <= limit for error, limit in zip(worst, limits, strict=True)]
    said = [
        f"{name}: error at most {error:.2e}, limit {limit:.0e}: {'met' if good else 'MISSED'}"
        for name, error, limit, good in zip(names, worst, limits, met, strict=True)
    ]
    return met[0] and met[1], said


def main() -> None:
    print("context  stored    of 4 tokens           best scales")
    for context in CONTEXTS:
        case = inputs(context, "cpu")
        exact = case.attend(case.rows)
        named = case.slots[case.slots >= 0].unique().long()
        stored, best = case.rows.float(), case.rows.float()
        stored[named] = reference.unpack_fp8_ds_mla(reference.pack_fp8_ds_mla(case.rows[named]))
        for part in named.split(1 << 14):
            groups = case.rows[part, :LATENT_DIM].reshape(-1, 128)
            best[part, :LATENT_DIM] = best_held(groups, 128).float().view(-1, LATENT_DIM)
        out = case.attend(stored)
        parts = by_few(out, exact)
        least = relative_rms(case.attend(best), exact)
        whole = relative_rms(out, exact)
        print(f"{context:7}  {whole:.2e}  {min(parts):.2e} to {max(parts):.2e}  {least:.2e}", flush=True)


if __name__ == "__main__":
    main()
