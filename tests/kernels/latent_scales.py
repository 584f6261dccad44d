"""The best that a packed row can hold of a group of latents: every scale tried."""

from __future__ import annotations

import torch

from glm5deploy.kernels.layout import FP8_MAX


def best_held(x: torch.Tensor, tried: int) -> torch.Tensor:
    """float64 [N, G] that e4m3 codes times one scale a group hold of x [N, G] with the least squared error.

    So many scales, evenly over a factor of two, give the codes; with another power of two the steps of e4m3 fall alike.
    For given codes y the best scale is <x, y> / <y, y>. The nearest codes are the best ones for a given scale, so what
    is left to the writer of a cache is the scale alone.
    """
    x = x.double()
    unit = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / FP8_MAX
    gain, best = torch.full_like(unit, -1.0), torch.zeros_like(x)
    for i in range(tried):
        y = (x / (unit * 2 ** (i / tried))).float().to(torch.float8_e4m3fn).double()
        xy, yy = (x * y).sum(-1, keepdim=True), (y * y).sum(-1, keepdim=True).clamp_min(1e-30)
        its = xy * xy / yy
        best = torch.where(its > gain, y * (xy / yy), best)
        gain = torch.maximum(gain, its)
    return best
