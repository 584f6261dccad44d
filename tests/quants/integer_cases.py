"""Small products of routed experts that leave out nothing a kernel could get wrong, and what they should give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from glm5deploy.quants import reference
from glm5deploy.quants.formats import FORMATS
from glm5deploy.quants.planes import Planes, repack
from tests.quants.blocks import random_rows

TOPK = 4
ROUNDED = ("Q6_K", "IQ4_XS")  # types whose scale times code has more bits than fp16


def pairs_of(counts: tuple[int, ...]) -> torch.Tensor:
    """ids int32 [T, TOPK]: so many pairs of each expert, among some of other ranks."""
    labels = np.repeat(np.arange(len(counts)), counts)
    missing = 3 + -(len(labels) + 3) % TOPK
    labels = np.random.default_rng(3).permutation(np.concatenate((labels, np.full(missing, -1))))
    return torch.from_numpy(labels.astype(np.int32).reshape(-1, TOPK))


def ordinary_rows(rows: int) -> int:
    return rows // 2


def awkward_planes(name: str, experts: int, rows: int, supers: int, empty: int, seed: int) -> Planes:
    """Weights of random blocks; those of expert `empty` are NaN.

    Rows from `ordinary_rows` on have largest and smallest codes, scales and factors, zero and negative ones too; where
    the type has codebooks, factors alone.
    """
    f = FORMATS[name]
    raw = (
        random_rows(name, experts * rows, supers * 256, seed, scale=1e-3)
        .numpy()
        .reshape(experts, rows, supers, f.block_bytes)
    )
    codes = [slice(b.start, b.start + b.size) for b in (f.low_bits, f.high_bits) if b is not None]
    scales = slice(f.words[0], sum(f.words))
    patterns = [(0xFF, 0xFF, None), (0x00, 0xFF, None), (0x00, 0x80, None), (0xFF, 0x80, None), (0xFF, 0x7F, None)]
    patterns += [(None, None, value) for value in (0.0, 65504.0, 6e-8, -0.01)]
    for row in range(ordinary_rows(rows), rows):
        for sb in range(supers):
            if (kind := (row + 5 * sb) % 12) < len(patterns):
                code, scale, factor = patterns[kind]
                block = raw[:, row, sb]
                for part in codes:
                    block[:, part] = block[:, part] if code is None else code
                block[:, scales] = block[:, scales] if scale is None else scale
                for at in f.halves if factor is not None else ():
                    block[:, at : at + 2] = np.array([factor], np.float16).view(np.uint8)
    raw[empty : empty + 1] = 0xFF
    return repack(name, torch.from_numpy(raw.reshape(experts, rows, -1)))


def awkward_rows(rows: int, columns: int, large: float, seed: int = 5) -> torch.Tensor:
    """bf16 [rows, columns]: zeros, numbers `large` and 1e-30 times others, in a row and between rows."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32))
    x[0:1] = 0
    x[1:2, ::37] *= large
    x[2:3, 1::2] *= 1e-30
    x[3:4] *= large
    x[4:5] *= 1e-30
    x[5:6] = -0.0
    return x.to(torch.bfloat16)


@dataclass(frozen=True)
class Products:
    """x times a weight's rows in fp64, and by how much products that round as ours do may miss it."""

    exact: torch.Tensor
    slack: torch.Tensor


def products(x: torch.Tensor, planes: Planes, experts: torch.Tensor) -> Products:
    """[R, N] of x bf16 [R, K], each row with its own expert; weights are gguf-py's (tests/quants/test_reference.py).

    Those of ROUNDED become fp16, of 11 bits. Activations keep 2^-24 of a row's largest; factors and sums are fp32.
    """
    weights = reference.dequantize_planes(planes).double()[experts]  # [R, N, K]
    wide = x.double()[:, :, None]
    sizes = (weights.abs() @ wide.abs())[..., 0]
    largest = weights.abs().sum(-1) * wide.abs().amax(1)
    rounding = 2.0**-11 if planes.format.name in ROUNDED else 2.0**-20
    return Products((weights @ wide)[..., 0], sizes * rounding + largest * 2.0**-24)


def missed(found: torch.Tensor, exact: torch.Tensor, slack: torch.Tensor) -> dict[str, float]:
    """How far bf16 or fp32 numbers [R, N] are off.

    `rms`: largest relative root-mean-square error of a row, where weights are ordinary; `worst`: largest error of an
    element over what rounding explains; `off`: the share of elements that are not the nearest once they are bf16.
    """
    nearest = exact.to(torch.float32).to(found.dtype)
    off = (found.to(torch.bfloat16) != nearest.to(torch.bfloat16)).double().mean()
    beyond = nearest.isinf() & (found == nearest)
    exact = torch.where(beyond, 0.0, exact)
    error = torch.where(beyond, 0.0, found.double() - exact)
    worst = error.abs() / (slack + exact.abs() * (2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-22) + 1e-38)
    ordinary = slice(0, ordinary_rows(exact.shape[1]))
    rows = error[:, ordinary].square().mean(1) / exact[:, ordinary].square().mean(1).clamp(min=1e-70)
    return {"rms": float(rows.max().sqrt()), "worst": float(worst.max()), "off": float(off)}
