"""e4m3 in integer arithmetic, device functions.

Triton has no conversion to or from `float8e4nv` before SM89, so every kernel of this package that converts does it
with bits: one code path for all GPUs, exact, and the same under the interpreter.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from glm5deploy.kernels.layout import SCALE_CANDIDATES

_CANDIDATES = tl.constexpr(SCALE_CANDIDATES)


@triton.jit
def e4m3_to_f32(b_byte):
    """Value of e4m3 bytes (uint8, any shape) as fp32; exact, subnormals included, NaN codes not expected.

    Sign and the seven other bits land on fp32's sign, exponent and top of the mantissa; that number is too small by
    2^(127-7), whatever its exponent, because subnormals of both formats scale alike.
    """
    b_bits = b_byte.to(tl.uint32)
    b_f32 = ((b_bits & 0x80) << 24) | ((b_bits & 0x7F) << 20)
    return b_f32.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
def e4m3_to_bf16(b_byte):
    """The same as bf16, four bytes at a time in packed instructions (PTX, SM80 and later; not for the interpreter).

    Called impure on purpose: of a pure function the compiler takes the change of layout first, and moves single bytes.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, a, b, up, zero;
        mov.b32 up, 0x7B807B80;
        mov.b32 zero, 0x80008000;
        prmt.b32 low, $2, 0, 0x1404;
        prmt.b32 high, $2, 0, 0x3424;
        shr.u32 a, low, 4;
        shr.u32 b, high, 4;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        lop3.b32 a, low, 0x80008000, a, 0xEA;
        lop3.b32 b, high, 0x80008000, b, 0xEA;
        fma.rn.bf16x2 $0, a, up, zero;
        fma.rn.bf16x2 $1, b, up, zero;
        }
        """,
        "=r,=r,r",
        [b_byte],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=4,
    )


@triton.jit
def f32_to_e4m3(b_x):
    """e4m3 byte (uint8) nearest to fp32 values of magnitude at most 448, ties to even."""
    b_bits = b_x.to(tl.uint32, bitcast=True)
    b_sign = (b_bits >> 24) & 0x80
    b_abs = b_bits & 0x7FFFFFFF
    b_normal = ((b_abs + 0x7FFFF + ((b_abs >> 20) & 1)) >> 20) - 960  # 960 = (127 - 7) << 3
    # Below 2^-6 the step is 2^-9, the unit in the last place of numbers near 2^14: the addition rounds.
    b_small = (b_abs.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    b_code = tl.where(b_abs < 0x3C800000, b_small, b_normal)
    return (b_sign | tl.minimum(b_code, 0x7E)).to(tl.uint8)


@triton.jit
def power_of_two_scale(b_amax):
    """2^ceil(log2(max(amax, 1e-4) / 448)) and its inverse, fp32, from the bits: 448 = 1.75 * 2^8."""
    b_bits = tl.maximum(b_amax, 1e-4).to(tl.uint32, bitcast=True)
    b_exponent = (b_bits >> 23) - 8 + ((b_bits & 0x7FFFFF) > 0x600000).to(tl.uint32)
    b_scale = (b_exponent << 23).to(tl.float32, bitcast=True)
    b_inverse = ((254 - b_exponent) << 23).to(tl.float32, bitcast=True)
    return b_scale, b_inverse


@triton.jit
def round_to_e4m3(b_x):
    """fp32 values of magnitude at most 464 rounded to what e4m3 holds, ties to even, as fp32.

    Adding 1.5 * 2^(e + 20) leaves no bit below 2^(e - 3), e4m3's step at 2^e; below 2^-6 the step stays 2^-9.
    """
    b_exponent = b_x.to(tl.uint32, bitcast=True) & 0x7F800000
    b_big = (tl.maximum(b_exponent, 0x3C800000) + 0x0A400000).to(tl.float32, bitcast=True)
    return (b_x + b_big) - b_big


@triton.jit
def quantise_latent(b_x):
    """e4m3 bytes [G, N] and fp32 scales [G] of fp32 groups [G, N], as `reference.quantise_latent` finds them.

    Eight candidates a round, unrolled, so that their sums over a group do not wait for each other.
    """
    b_unit = tl.maximum(tl.max(tl.abs(b_x), axis=1), 1e-4) / 448.0
    b_z = b_x / b_unit[:, None]
    b_gain, b_chosen = b_unit * 0.0, tl.full(b_unit.shape, 1.0, tl.float32)
    for i in range(_CANDIDATES // 8):
        for j in tl.static_range(8):
            b_factor = tl.exp2((tl.zeros_like(b_unit) + (8 * i + j)) * (-1.0 / _CANDIDATES))
            b_y = round_to_e4m3(b_z * b_factor[:, None])
            b_zy = tl.sum(b_z * b_y, axis=1)
            b_its = b_zy * b_zy / tl.maximum(tl.sum(b_y * b_y, axis=1), 1e-30)
            b_chosen = tl.where(b_its > b_gain, b_factor, b_chosen)
            b_gain = tl.maximum(b_gain, b_its)
    b_z = b_z * b_chosen[:, None]
    b_y = round_to_e4m3(b_z)
    b_yy = tl.sum(b_y * b_y, axis=1)
    b_fit = tl.where(b_yy > 0.0, tl.sum(b_z * b_y, axis=1) / tl.maximum(b_yy, 1e-30), 1.0)
    b_bits = (b_unit / b_chosen * b_fit).to(tl.uint32, bitcast=True)
    b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) & 0xFFFF0000  # what bf16 holds, in which SM90's kernel reads it
    return f32_to_e4m3(b_z), b_bits.to(tl.float32, bitcast=True)
