"""Host side of sparse MLA: checks, launch parameters, workspace."""

from __future__ import annotations

import torch
import triton

from glm5deploy.kernels.latent_cache import byte_view
from glm5deploy.kernels.layout import LATENT_DIM, PACKED_ROW_BYTES, QK_DIM, ROPE_DIM
from glm5deploy.kernels.sparse_mla import combine_splits_kernel, sparse_mla_fwd_kernel
from glm5deploy.kernels.tuning import SparseConfig

_LOG2_E = 1.4426950408889634
_COMBINE_DIMS = 256


def sparse_mla_fwd(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    slots: torch.Tensor,
    counts: torch.Tensor | None,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    config: SparseConfig | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    nope, rope = q if isinstance(q, tuple) else (q[..., :LATENT_DIM], q[..., LATENT_DIM:])
    tokens, heads, _ = nope.shape
    keys = slots.shape[1]
    packed = rows.dtype == torch.uint8
    if out is None:
        out = nope.new_empty((tokens, heads, LATENT_DIM))
    if lse is None:
        lse = nope.new_empty((tokens, heads), dtype=torch.float32)
    scales, ropes = (byte_view(rows, torch.float32), byte_view(rows, nope.dtype if nope.element_size()==2 else torch.bfloat16)) if packed else (rows, rows)
    per_split = triton.cdiv(triton.cdiv(keys, splits), config.block_keys) * config.block_keys
    splits = triton.cdiv(keys, per_split)
    if splits > 1:
        ws = workspace if workspace is not None else nope.new_empty(tokens*heads*splits*513, dtype=torch.float32)
        n = tokens * heads * splits * LATENT_DIM
        part, part_lse = ws[:n], ws[n:n + tokens * heads * splits]
    else:
        part, part_lse = out, lse
    grid = (triton.cdiv(heads, config.block_heads), tokens, splits)
    sparse_mla_fwd_kernel[grid](
        nope, rope, rows, scales, ropes, slots, counts if counts is not None else slots, part, part_lse, scale * _LOG2_E, keys, per_split,
        nope.stride(0), nope.stride(1), rope.stride(0), rope.stride(1), slots.stride(0),
        H=heads, BH=config.block_heads, BK=config.block_keys, SPLIT=splits > 1, KV_FP8=packed, HAS_COUNTS=counts is not None,
        num_warps=config.warps, num_stages=config.stages)
    if splits > 1:
        combine_splits_kernel[(tokens * heads, LATENT_DIM // _COMBINE_DIMS)](part, part_lse, out, lse, splits, BS=triton.next_power_of_2(splits), BD=_COMBINE_DIMS, num_warps=4)
    return out, lse
