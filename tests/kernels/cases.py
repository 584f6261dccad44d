"""Inputs shared by the kernel tests: latent rows with poison where nothing may look, slots, paged key caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm5deploy.kernels.layout import INDEX_DIM, INDEX_KEY_BYTES, QK_DIM

GAP = 64


@dataclass(frozen=True)
class Sparse:
    """q [T, H, 576], rows [N, 576] (NaN where no slot points), slots int32 [T, K]."""

    q: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor


def sparse_case(tokens: int, heads: int, keys: int, dtype: torch.dtype = torch.float16, rows: int = 96) -> Sparse:
    """A third of the slots are -1, token 1 (if there is one) has none at all; half of the rows are NaN."""
    q = torch.randn(tokens, heads, QK_DIM).to(dtype)
    latent = torch.randn(rows, QK_DIM).to(dtype)
    slots = torch.randint(0, rows // 2, (tokens, keys), dtype=torch.int32)
    slots[torch.rand(tokens, keys) < 0.33] = -1
    if tokens > 1:
        slots[1] = -1
    used = slots[slots >= 0].unique().long()
    poisoned = torch.full_like(latent, torch.nan)
    poisoned[used] = latent[used]
    return Sparse(q, poisoned, slots)


def paged_bytes(blocks: int, block_size: int, width: int) -> torch.Tensor:
    """A uint8 cache [blocks, block_size, width] whose blocks lie apart, as when other layers' blocks lie between."""
    stride = block_size * width + GAP
    memory = torch.full((blocks * stride,), 0xFF, dtype=torch.uint8)
    return memory.as_strided((blocks, block_size, width), (stride, width, 1))


def key_cache(blocks: int, block_size: int) -> torch.Tensor:
    return paged_bytes(blocks, block_size, INDEX_KEY_BYTES)


def e4m3(*shape: int) -> torch.Tensor:
    """Random numbers that e4m3 represents, as float8_e4m3fn [*shape, 128]."""
    return torch.randn(*shape, INDEX_DIM).to(torch.float8_e4m3fn)
