"""Random and adversarial blocks of every GGML type."""

from __future__ import annotations

import numpy as np
import torch

from glm5deploy.quants.formats import FORMATS

TYPES = tuple(FORMATS)
QUANTISED = tuple(name for name, f in FORMATS.items() if not f.dense)

# a minimum over the scale that puts zero in the middle of the codes
_MINIMUM = {"Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5, "Q4_1": -7.5, "Q5_1": -15.5}
# where a block keeps its fp16 fields (scale, minimum)
_HALVES = {name: f.halves[:1] if name == "IQ4_XS" else f.halves for name, f in FORMATS.items()}


def row_bytes(name: str, columns: int) -> int:
    f = FORMATS[name]
    return columns // f.block_elements * f.block_bytes


def random_rows(name: str, rows: int, columns: int, seed: int = 42, scale: float = 0.01) -> torch.Tensor:
    """Every code and scale bit random, fp16 scales near ``scale`` with random signs: uint8 [rows, row bytes]."""
    rng = np.random.default_rng(seed)
    f = FORMATS[name]
    if f.dense:
        values = torch.from_numpy(rng.standard_normal((rows, columns), dtype=np.float32) * scale)
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return values.to(dtype).view(torch.uint8)
    blocks = rng.integers(0, 256, (rows, columns // f.block_elements, f.block_bytes), dtype=np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:-1])
    size = (1 + rng.random(blocks.shape[:-1])) * scale * np.where(rng.random(blocks.shape[:-1]) < 0.25, -1, 1)
    for k, at in enumerate(_HALVES[name]):
        factor = _MINIMUM.get(name, 0) if k else 1
        jitter = 1 + 0.1 * rng.random(size.shape)
        blocks[..., at : at + 2] = (size * factor * jitter).astype(np.float16)[..., None].view(np.uint8)
    if name in ("Q4_K", "Q5_K"):  # a group's minimum byte near its scale byte, as weights around zero have it
        blocks[..., 8:12] = blocks[..., 4:8] ^ (blocks[..., 8:12] & 3)
        blocks[..., 12:16] = (blocks[..., 12:16] & 15) * 17 ^ (blocks[..., 12:16] & 0x30)
    if name == "Q2_K":
        blocks[..., :16] = (blocks[..., :16] & 15) * 17 ^ (blocks[..., :16] & 0x10)
    return torch.from_numpy(blocks.reshape(rows, -1))


def any_bits(name: str, rows: int, columns: int, seed: int) -> torch.Tensor:
    """All bytes random: scales may be infinite, NaN, denormal or zero."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 256, (rows, row_bytes(name, columns)), dtype=np.uint8))


def adversarial(name: str) -> torch.Tensor:
    """Blocks of one byte value each (all 256), then blocks whose fp16 fields are every special value."""
    f = FORMATS[name]
    size, per_row = f.block_bytes, f.blocks if not f.dense else 256
    same = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size * per_row, axis=1)
    specials = np.array([0, 0x8000, 1, 0x8001, 0x03FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00], dtype=np.uint16)
    rng = np.random.default_rng(7)
    rows = []
    for value in specials:
        blocks = rng.integers(0, 256, (per_row, size), dtype=np.uint8)
        for at in _HALVES[name]:
            blocks[:, at : at + 2] = np.array([value]).view(np.uint8)
        rows.append(blocks.reshape(-1))
    return torch.from_numpy(np.concatenate([same, np.stack(rows)]))
