"""Sizes and byte layouts of the two caches, as vLLM 0.32 and 0.33 write them.

Packed latent row (`fp8_ds_mla`), 656 bytes a token: 512 e4m3 values, four fp32 scales (one a group of 128 values),
64 bf16 RoPE values. Index-key block, `block_size * 132` bytes: all values of the block (128 e4m3 each) come first,
then all of its fp32 scales; the 132 bytes of one token are therefore not adjacent.
"""

from __future__ import annotations

LATENT_DIM = 512
ROPE_DIM = 64
QK_DIM = LATENT_DIM + ROPE_DIM

FP8_MAX = 448.0
FP8_GROUP = 128
LATENT_GROUPS = LATENT_DIM // FP8_GROUP
# A group whose largest magnitude is below this is quantised as if it were this large.
AMAX_FLOOR = 1e-4
# Scales that are tried for a group of a packed row, evenly over a factor of two.
SCALE_CANDIDATES = 24

PACKED_SCALE_OFFSET = LATENT_DIM
PACKED_ROPE_OFFSET = LATENT_DIM + 4 * LATENT_GROUPS
PACKED_ROW_BYTES = PACKED_ROPE_OFFSET + 2 * ROPE_DIM

INDEX_DIM = 128
INDEX_ROPE_DIM = 64
INDEX_KEY_BYTES = INDEX_DIM + 4


def row_tile(width: int, warps: int) -> tuple[int, int]:
    """Rows and columns, powers of two, of a tile that holds a row's ``width`` numbers: eight in a line for a thread."""
    columns = min(256 * warps, 1 << (width - 1).bit_length())
    return 1 << (-(-width // columns) - 1).bit_length(), columns


def require(condition: bool, message: str) -> None:
    """Raise ValueError with the message unless the condition holds: a kernel itself trusts its caller."""
    if not condition:
        raise ValueError(message)
