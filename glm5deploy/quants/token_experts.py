"""What a layer's experts are computed from, beside the routed ones' weights: the shared one's, and who chooses."""

from __future__ import annotations

from typing import NamedTuple

import torch

from glm5deploy.quants.planes import Planes


class Shared(NamedTuple):
    """An expert that every token goes to: gate and up, in one set of planes of both's rows or in two; down."""

    gate_up: tuple[Planes, ...]
    down: Planes

    @property
    def units(self) -> int:
        return self.gate_up[0].rows if len(self.gate_up) == 2 else self.gate_up[0].rows // 2

    def fits(self, gate: Planes, up: Planes, down: Planes) -> bool:
        """Whether it has the shape of the routed experts."""
        parts = len(self.gate_up)
        return (
            parts in (1, 2)
            and {p.rows for p in self.gate_up} == {gate.rows * (3 - parts)}
            and gate.rows == up.rows == down.columns == self.down.columns
            and {p.columns for p in (gate, up, *self.gate_up)} == {gate.columns}
            and self.down.rows == down.rows
            and {p.experts for p in (*self.gate_up, self.down)} == {1}
        )


class Choice(NamedTuple):
    """A router's logits fp32 [T, E] and bias fp32 [E]: the ``topk`` experts with the greatest sigmoid + bias.

    Their weights are the sigmoids over the sum of these and 1e-20, times ``scale``. Of equals the first are chosen.
    """

    logits: torch.Tensor
    bias: torch.Tensor
    topk: int
    scale: float

    def check(self, tokens: int, experts: int) -> None:
        """ValueError where it is not one of ``tokens`` tokens among ``experts`` experts."""
        shapes, types = (self.logits.shape, self.bias.shape), (self.logits.dtype, self.bias.dtype)
        if shapes != ((tokens, experts), (experts,)) or types != (torch.float32,) * 2 or not 0 < self.topk <= experts:
            raise ValueError(
                f"{self.topk} of {experts} experts of {tokens} tokens cannot be chosen by {shapes}, {types}"
            )

    def chosen(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids int32 and weights fp32, both [T, TOPK]: what kernels are compared with."""
        scores = self.logits.sigmoid()
        ids = (scores + self.bias).sort(dim=1, descending=True, stable=True)[1][:, : self.topk]
        weights = scores.gather(1, ids)
        return ids.to(torch.int32), weights * (self.scale / (weights.sum(1, keepdim=True) + 1e-20))
