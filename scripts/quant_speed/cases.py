"""Weights, activations and references of the products that GLM-5 needs on one of eight tensor-parallel ranks."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from glm5deploy.quants import launch, products, reference
from glm5deploy.quants.formats import FORMATS, format_of
from glm5deploy.quants.planes import Planes, empty_planes, repack

DEVICE = "cuda"
LINEAR_SHAPES = ((2624, 6144), (2048, 2048), (6144, 2048), (19360, 6144))
LINEAR_TYPES = ("Q4_K", "Q6_K", "Q8_0")
LINEAR_TOKENS = (1, 4, 16, 64, 512, 2048)
MOE_TYPES = (("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q4_K", "Q6_K"))
MOE_TOKENS = (1, 4, 16, 64, 256, 2048)
CHECKED_TOKENS = (1, 2, 3, 8, 17, 64, 100, 512, 2048)
EXPERTS, TOPK, HIDDEN, UNITS = 256, 8, 6144, 256
# A minimum over the scale that puts zero in the middle of the codes
_MINIMUM = {"Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5, "Q4_1": -7.5, "Q5_1": -15.5}
_COLD_BYTES = 2.5e8  # of weights in turn, more than any cache holds


def random_rows(name: str, rows: int, columns: int) -> torch.Tensor:
    """Row bytes of a type on the GPU: codes and scale bits random, fp16 scales around 0.01."""
    fmt = format_of(name)
    if fmt.dense:
        values = torch.randn((rows, columns), device=DEVICE) * 0.02
        return values.to({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]).view(torch.uint8)
    shape = (rows, columns // fmt.block_elements, fmt.block_bytes)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    scale = (torch.rand(shape[:-1], device=DEVICE) + 1) * 0.01
    for k, at in enumerate(fmt.halves[:1] if name == "IQ4_XS" else fmt.halves):
        half = (scale * (_MINIMUM[name] if k else 1)).to(torch.float16)
        blocks[..., at : at + 2] = half[..., None].view(torch.uint8)
    if name in ("Q4_K", "Q5_K"):  # a group's minimum byte near its scale byte, as weights around zero have it
        blocks[..., 8:12] = blocks[..., 4:8] ^ (blocks[..., 8:12] & 3)
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17 ^ (blocks[..., 12:16] & 0x30)
    if name == "Q2_K":
        blocks[..., :16] = (blocks[..., :16] & 15) * 17 ^ (blocks[..., :16] & 0x10)
    if name == "MXFP4":
        blocks[..., 0] = 120
    return blocks.reshape(rows, -1)


@dataclass(frozen=True)
class Weights:
    """One matrix, or one of every expert: the file's rows [E, N, row bytes] (peers read them) and our planes."""

    rows: torch.Tensor
    planes: Planes

    def dense(self) -> torch.Tensor:
        """fp32 [E, N, K]."""
        return reference.dequantize_planes(self.planes)


def weights(name: str, rows: int, columns: int, experts: int = 1) -> Weights:
    planes = empty_planes(name, rows, columns, experts, DEVICE)
    raw = []
    for e in range(experts):
        raw.append(random_rows(name, rows, columns))
        planes.slice(e, e + 1).copy_(repack(name, raw[e]))
    return Weights(torch.stack(raw), planes)


def expert_weights(names: tuple[str, str, str], experts: int = EXPERTS) -> tuple[Weights, Weights, Weights]:
    shapes = ((UNITS, HIDDEN), (UNITS, HIDDEN), (HIDDEN, UNITS))
    gate, up, down = (weights(name, *shape, experts) for name, shape in zip(names, shapes, strict=True))
    return gate, up, down


def copies(name: str, rows: int, columns: int) -> int:
    """Weights to take in turn so that no call finds its own in cache."""
    return max(2, min(64, round(_COLD_BYTES / (rows * columns * format_of(name).plane_bytes // 256))))


def activations(tokens: int, columns: int) -> torch.Tensor:
    return torch.randn((tokens, columns), device=DEVICE, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Routed:
    """One call of a layer of experts."""

    x: torch.Tensor
    ids: torch.Tensor
    share: torch.Tensor

    @property
    def active(self) -> int:
        return int(self.ids.unique().numel())


def routed(tokens: int, count: int) -> list[Routed]:
    """``count`` calls with random experts."""
    found = []
    for _ in range(count):
        ids = torch.rand((tokens, EXPERTS), device=DEVICE).topk(TOPK).indices.to(torch.int32)
        found.append(Routed(activations(tokens, HIDDEN), ids, torch.rand((tokens, TOPK), device=DEVICE)))
    return found


def mean_active(calls: list[Routed]) -> float:
    return statistics.mean(call.active for call in calls)


def moe_reference(call: Routed, dense: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """fp32 [T, HIDDEN] from weights that are dequantised already."""
    gate, up, down = dense
    out = torch.zeros((call.x.shape[0], HIDDEN), device=DEVICE)
    for expert in call.ids.unique().tolist():
        token, slot = (call.ids == expert).nonzero(as_tuple=True)
        rows = call.x[token].float()
        hidden = torch.nn.functional.silu(rows @ gate[expert].T) * (rows @ up[expert].T)
        out.index_add_(0, token, (hidden @ down[expert].T) * call.share[token, slot, None])
    return out


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, root mean square; infinite where a result is not finite."""
    if not torch.isfinite(found).all():
        return float("inf")
    return float((found.float() - expected).norm() / expected.norm())


def exact_product(x: torch.Tensor, dense: torch.Tensor, offset: float) -> torch.Tensor:
    """What products.linear of x [M, K] + ``offset`` is compared with, fp32 [M, N]; ``dense`` fp32 [N, K].

    Where weights are rounded to bf16 for cuBLAS and activations have an offset in common, of the rounded weights: a
    block's few different values are rounded alike, and with one sign before them their errors add up. That is 4.1e-3
    to 4.6e-3 for Q2_K, and no fault of a kernel's.
    """
    rounded = offset and x.shape[0] >= launch.DENSE_TOKENS
    return x.float() @ (dense.to(torch.bfloat16).float() if rounded else dense).T


def type_errors() -> dict[str, tuple[float, str]]:
    """Worst error of a product with a small weight of every type, and at how many tokens of the counts to be checked.

    Activations far from zero are among them ("+ 8"): sums of codes are differences of two larger sums then.
    """
    worst = {}
    for name in FORMATS:
        weight = weights(name, 192, 512)
        dense = weight.dense()[0]
        found = []
        for tokens in CHECKED_TOKENS:
            x = activations(tokens, 512)
            for offset, case in ((0, f"{tokens} tokens"), (8, f"{tokens} tokens + 8")):
                y = x + offset
                found.append((error(products.linear(y, weight.planes), exact_product(y, dense, offset)), case))
        worst[name] = max(found)
    return worst
