"""Codebook types (IQ2_*, IQ3_*) as a sign and a magnitude a weight, which kernels read without a gather.

The exchange is exact: a codebook row lists magnitudes out of three (IQ2) or eight (IQ3) values, so its entry is named
by two or three bits, and the sign is one more. Memory grows by :attr:`Format.growth`. Letters: R rows, S
super-blocks.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from glm5deploy.quants.formats import Format

_SHIFTS7 = (0, 7, 14, 21)


@lru_cache(maxsize=16)
def _codebook(name: str, magnitudes: tuple[int, ...], device: str) -> torch.Tensor:
    """uint8 [entries, 8 or 4]: index of each magnitude in the format's table. The codebooks are gguf-py's."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    grid = torch.from_numpy(kind.grid.reshape(kind.grid_shape).copy())
    return (grid[..., None] == torch.tensor(magnitudes)).to(torch.uint8).argmax(-1).to(torch.uint8).to(device)


def _u32(data: torch.Tensor) -> torch.Tensor:
    """Little-endian bytes [..., 4n] as int64 [..., n]."""
    return data.clone(memory_format=torch.contiguous_format).view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def _shifted(values: torch.Tensor, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """[..., n] to [..., n * len(shifts)], each value split into fields."""
    steps = torch.tensor(shifts, dtype=values.dtype, device=values.device)
    return ((values[..., None] >> steps) & mask).flatten(-2)


def _sign_bits(signs: torch.Tensor, bits: int) -> torch.Tensor:
    """Sign fields [..., n] of eight weights each to 0/1 [..., 8n]; the eighth sign of a 7-bit field is its parity."""
    if bits == 7:
        parity = _shifted(signs, tuple(range(7)), 1).unflatten(-1, (-1, 7)).sum(-1) & 1
        signs = signs | (parity << 7)
    return _shifted(signs, tuple(range(8)), 1)


def _nibble_bytes(nibbles: torch.Tensor) -> torch.Tensor:
    """Nibbles [..., 2n] to bytes [..., n], the first in the low half."""
    pairs = nibbles.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).to(torch.uint8)


def _fields(name: str, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [..., bytes] to codebook indices [..., n], signs [..., 256] and scale bytes [..., 4 or 8]."""
    wide = b.to(torch.int64)
    if name == "IQ2_XXS":
        tail = _u32(b[..., 2:66]).unflatten(-1, (8, 2))[..., 1]
        index = wide[..., 2:66].unflatten(-1, (8, 8))[..., :4].flatten(-2)
        return index, _sign_bits(_shifted(tail, _SHIFTS7, 0x7F), 7), _nibble_bytes(tail >> 28)
    if name == "IQ2_XS":
        pairs = wide[..., 2:66].unflatten(-1, (32, 2))
        both = pairs[..., 0] | (pairs[..., 1] << 8)
        return both & 511, _sign_bits(both >> 9, 7), b[..., 66:74]
    if name == "IQ2_S":
        index = wide[..., 2:34] | (_shifted(wide[..., 66:74], (0, 2, 4, 6), 3) << 8)
        return index, _sign_bits(wide[..., 34:66], 8), b[..., 74:82]
    if name == "IQ3_XXS":
        tail = _u32(b[..., 66:98])
        return wide[..., 2:66], _sign_bits(_shifted(tail, _SHIFTS7, 0x7F), 7), _nibble_bytes(tail >> 28)
    assert name == "IQ3_S", name
    index = wide[..., 2:66] | (_shifted(wide[..., 66:74], tuple(range(8)), 1) << 8)
    return index, _sign_bits(wide[..., 74:106], 8), b[..., 106:110]


def sign_magnitude(fmt: Format, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [R, S, 256] and scale bytes uint8 [R, S, 4 or 8] of codebook blocks uint8 [R, S, block bytes]."""
    index, signs, scales = _fields(fmt.name, blocks)
    half = len(fmt.table) // 2
    magnitudes = _codebook(fmt.name, fmt.table[:half], str(blocks.device))[index].flatten(-2)
    return magnitudes | (signs.to(torch.uint8) * half), scales
