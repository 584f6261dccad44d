"""Which thread of a warp holds which elements of a matrix, in every warp at once.

PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix".
"""

from __future__ import annotations

import numpy as np

from tests.kernels.ptx_arithmetic import Array

ROW = 16  # bytes of a row of one 8 x 8 matrix of 16 bits


def _turned(halves: Array, transposed: bool) -> Array:
    return np.ascontiguousarray(halves.swapaxes(1, 2) if transposed else halves)


def registers_of_rows(rows: Array, matrices: int, transposed: bool) -> Array:
    """Rows uint8 [warps * matrices * 8, 16] to what threads get of each matrix, uint32 [matrices, warps * 32]."""
    halves = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 8, 8)
    words = _turned(halves, transposed).reshape(-1).view(np.uint32).reshape(-1, matrices, 32)
    return words.swapaxes(0, 1).reshape(matrices, -1)


def rows_of_registers(registers: list[Array], transposed: bool) -> Array:
    """``registers_of_rows`` backwards."""
    words = np.stack([register.reshape(-1, 32) for register in registers], 1)
    halves = words.reshape(-1).view(np.uint16).reshape(-1, 8, 8)
    return _turned(halves, transposed).reshape(-1).view(np.uint8).reshape(-1, ROW)


def multiply(a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """mma.m16n8k16: c + a b. a four and b two registers of fp16 pairs, c four of fp32, each [warps * 32]."""

    def pairs(register: Array) -> Array:
        """fp64 [warps, 8, 8]: two numbers a thread, four threads a row."""
        return register.view(np.float16).reshape(-1, 8, 8).astype(np.float64)

    def numbers(first: Array, second: Array) -> Array:
        return np.stack((first, second), -1).reshape(-1, 8, 8).astype(np.float64)

    upper, lower = (np.concatenate((pairs(a[k]), pairs(a[k + 2])), 2) for k in (0, 1))
    right = np.concatenate((pairs(b[0]), pairs(b[1])), 2).swapaxes(1, 2)
    start = np.concatenate((numbers(c[0], c[1]), numbers(c[2], c[3])), 1)
    total = (start + np.concatenate((upper, lower), 1) @ right).astype(np.float32).reshape(-1, 2, 32, 2)
    return [np.ascontiguousarray(total[:, half, :, k]).reshape(-1) for half in (0, 1) for k in (0, 1)]
