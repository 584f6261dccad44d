"""Dequantisation in fp32, equal to gguf-py's bit for bit: the oracle of every kernel, and the CPU's dense path.

Formulae: ggml-quants.c's ``dequantize_row_*``; one rounding for the scale, one for the product, one for the minimum.
Letters as in planes.py; G groups of a super-block (8 of 32 weights or 16 of 16).
"""

from __future__ import annotations

import torch

from glm5deploy.quants.formats import SUPER, Format, Scales, format_of
from glm5deploy.quants.planes import _DENSE_DTYPES, Fields, Planes, fields_of, fields_of_planes
from glm5deploy.quants.token_experts import Choice, Shared


def _bytes(words: torch.Tensor) -> torch.Tensor:
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] to nibbles [..., 2n], low first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _group_scales(fmt: Format, words: torch.Tensor, halves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales fp32 [..., S, G] and minima, from packed words [..., S, W] and halves [..., S, H]."""
    kind = fmt.scales
    if kind is Scales.E8:
        e = _bytes(words).to(torch.int32)
        return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32), None
    h = halves.contiguous().view(torch.float16).to(torch.float32)
    if kind is Scales.BLOCK:
        return h, None
    if kind is Scales.BLOCK_MIN:
        return h[..., :8], -h[..., 8:]
    d, b = h[..., :1], _bytes(words)
    if kind is Scales.K4:
        lo, mid, hi = b[..., :4], b[..., 4:8], b[..., 8:]
        scale = torch.cat((lo & 63, (hi & 15) | (lo >> 6 << 4)), -1)
        least = torch.cat((mid & 63, (hi >> 4) | (mid >> 6 << 4)), -1)
        return d * scale.float(), h[..., 1:2] * least.float()
    if kind is Scales.K6:
        return d * b.view(torch.int8).float(), None
    if kind is Scales.K3:
        lo = torch.cat((b[..., :8] & 15, b[..., :8] >> 4), -1)
        hi = torch.cat([(b[..., 8:] >> s) & 3 for s in (0, 2, 4, 6)], -1)
        return d * ((lo | (hi << 4)).to(torch.int8) - 32).float(), None
    if kind is Scales.K2:
        return d * (b & 15).float(), h[..., 1:2] * (b >> 4).float()
    if kind is Scales.X4:
        upper = halves[..., 1:2].to(torch.int32)
        hi = (upper >> torch.arange(0, 16, 2, device=halves.device)) & 3
        return d * ((_nibbles(b).to(torch.int32) | (hi << 4)) - 32).float(), None
    assert kind in (Scales.NIBBLE, Scales.NIBBLE16), kind
    return d * (_nibbles(b).float() + 0.5) * fmt.factor, None


def _values(fmt: Format, fields: Fields) -> torch.Tensor:
    """Weights fp32 [..., S, 256]."""
    scale, least = _group_scales(fmt, fields.words, fields.halves)
    if fmt.table:
        numbers = torch.tensor(fmt.table, dtype=torch.float32, device=fields.codes.device)[fields.codes.to(torch.int64)]
    elif fmt.low == 8:
        numbers = fields.codes.contiguous().view(torch.int8).float()
    else:
        numbers = fields.codes.float() - fmt.offset
    groups = numbers.unflatten(-1, (-1, fmt.group))
    out = scale[..., None] * groups
    if least is not None:
        out = out - least[..., None]
    return out.flatten(-2)


def dequantize(type_name: str, raw: torch.Tensor) -> torch.Tensor:
    """Row bytes uint8 [..., row bytes] of a GGML type to fp32 [..., columns]."""
    fmt = format_of(type_name)
    if fmt.dense:
        return raw.contiguous().view(_DENSE_DTYPES[fmt.name]).to(torch.float32)
    columns = raw.shape[-1] // fmt.block_bytes * fmt.block_elements
    return _values(fmt, fields_of(fmt, raw)).flatten(-2)[..., :columns]


def dequantize_planes(planes: Planes) -> torch.Tensor:
    """Planes to fp32 [E, N, K]."""
    if planes.format.dense:
        return planes.low.to(torch.float32).permute(0, 3, 1, 2, 4).flatten(-3)[..., : planes.columns]
    return _values(planes.format, fields_of_planes(planes)).flatten(-2)[..., : planes.columns]


def linear(x: torch.Tensor, planes: Planes) -> torch.Tensor:
    """x [M, K] times the dequantised weight, fp32 [M, N]: what kernels are compared with."""
    return x.float() @ dequantize_planes(planes)[0].T


def moe(
    x: torch.Tensor, gate: Planes, up: Planes, down: Planes, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Sum over a token's experts of weight * down(silu(gate x) * up x), fp32 [T, K]; ids < 0 are another rank's."""
    w_gate, w_up, w_down = (dequantize_planes(p) for p in (gate, up, down))
    out = torch.zeros((x.shape[0], down.rows), dtype=torch.float32, device=x.device)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        rows = x[token].float()
        hidden = torch.nn.functional.silu(rows @ w_gate[expert].T) * (rows @ w_up[expert].T)
        out.index_add_(0, token, (hidden @ w_down[expert].T) * topk_weights[token, slot, None].float())
    return out


def experts_of_one(
    x: torch.Tensor, gate: Planes, up: Planes, down: Planes, shared: Shared, choice: Choice
) -> torch.Tensor:
    """As ``moe`` of chosen experts, fp32 [T, K], with what the shared expert gives every token."""
    first, last = torch.cat([linear(x, part) for part in shared.gate_up], 1).chunk(2, 1)
    beside = linear(torch.nn.functional.silu(first) * last, shared.down)
    return moe(x, gate, up, down, *choice.chosen()) + beside


__all__ = ["SUPER", "dequantize", "dequantize_planes", "experts_of_one", "linear", "moe"]
