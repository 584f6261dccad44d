"""Random weights in GGML's block formats.

gguf-py packs the older formats but not the K-quants of the files people serve. Random weights need no packer: random
quants under chosen scales are random weights, with mean zero and a given standard deviation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_BLOCK = 256  # elements of a super-block
_SCALES = (20, 64)  # range of the 6-bit scales of Q4_K and Q5_K; far from 0, so that no group vanishes
_SCALES_Q6 = (12, 32)  # of Q6_K's 8-bit scales
# Standard deviation of a uniform n-bit integer, times the root mean square of such scales.
_SPREAD = {"Q4_K": 4.61 * 43.4, "Q5_K": 9.23 * 43.4, "Q6_K": 18.47 * 22.3}
K_QUANTS = tuple(_SPREAD)


def random_k_quants(rng: np.random.Generator, shape: tuple[int, ...], kind: str, deviation: float) -> NDArray[np.uint8]:
    """Random rows in ``kind`` (Q4_K, Q5_K or Q6_K; layouts of ggml's ``block_q4_K`` and so on).

    ``shape`` counts weights, the last dimension is the row and a multiple of 256; the result has bytes in its place.
    """
    import numpy as np

    blocks = int(np.prod(shape)) // _BLOCK
    step = np.full(blocks, deviation / _SPREAD[kind], dtype=np.float16)
    fields: list[NDArray[np.uint8]]
    if kind == "Q6_K":
        signed = rng.integers(*_SCALES_Q6, (blocks, 16), dtype=np.int8)
        signed *= rng.integers(0, 2, (blocks, 16), dtype=np.int8) * 2 - 1
        fields = [_bytes(rng, blocks, 128 + 64), signed.view(np.uint8), _halves(step)]
    else:
        high, middle = (32, 15.5) if kind == "Q5_K" else (0, 7.5)
        # The minimum of a group is its scale times the middle quant, which centres the weights on zero.
        minimum = (step.astype(np.float32) * middle).astype(np.float16)
        scales = _six_bit_scales(rng.integers(*_SCALES, (blocks, 8), dtype=np.uint8))
        fields = [_halves(step), _halves(minimum), scales, _bytes(rng, blocks, high + 128)]
    packed: NDArray[np.uint8] = np.concatenate(fields, axis=1)
    return packed.reshape(*shape[:-1], -1)


def _six_bit_scales(scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Eight 6-bit scales and eight equal 6-bit minima in 12 bytes: low six bits of four, then the rest split up."""
    import numpy as np

    first, last = scales[:, :4], scales[:, 4:]
    packed = first | ((last >> 4) << 6)
    return np.concatenate([packed, packed, (last & 15) | ((last & 15) << 4)], axis=1)


def _halves(values: NDArray[np.float16]) -> NDArray[np.uint8]:
    import numpy as np

    return values.reshape(-1, 1).view(np.uint8)


def _bytes(rng: np.random.Generator, blocks: int, count: int) -> NDArray[np.uint8]:
    import numpy as np

    return rng.integers(0, 256, (blocks, count), dtype=np.uint8)
