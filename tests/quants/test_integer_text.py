"""Weights in fp16 as the assembly of products with integers makes them: every code with every scale, in every tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from glm5deploy.quants.arguments import kernel_format
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.integer_text import has_minima, pair_text, tile_text
from tests.kernels.ptx_program import Program


def program(fmt: tuple[Any, ...], i: int, group: int) -> str:
    """A kernel whose thread takes words of the low and high plane and of scale bytes, and gives a pair of weights."""
    high, minima = fmt[1] > 0, has_minima(fmt)
    pair = pair_text(fmt, group // 2 * 2)
    pair = pair.replace("$0", "%r4").replace("$1", "%r5").replace("$2", "%r3") if minima else pair.replace("$0", "%r4")
    planes = ["%r1", "%r2"] if high else ["%r1"]
    operands = ["%r6", *planes, "%r4", "%r4", "%r5", "%r5"]
    tile = tile_text(fmt, i)
    for k in reversed(range(len(operands))):
        tile = tile.replace(f"${k}", operands[k])
    loads = [f"ld.param.b64 %rd{k}, [parameter_{k}];" for k in range(4)]
    loads += [f"mad.wide.u32 %rd{k + 4}, %r0, 4, %rd{k};" for k in range(4)]
    loads += [f"ld.global.b32 %r{k + 1}, [%rd{k + 4}];" for k in range(3)]
    body = [*loads, pair.replace("$1", "%r3"), tile, "st.global.b32 [%rd7], %r6;", "ret;"]
    return "\n{\nmov.u32 %r0, %tid.x;\n" + "\n".join(body) + "\n}"


def filled(bits: Any, width: int, at: int, rng: np.random.Generator) -> Any:
    """Words whose halves have `bits` [words, 2] of `width` from bit `at` on, and anything elsewhere."""
    noise = rng.integers(0, 1 << 16, bits.shape)
    halves = noise & ~(((1 << width) - 1) << at) | bits << at
    return (halves[:, 0] | halves[:, 1] << 16).astype(np.uint32)


# The least scale, and one more than the largest; what their bytes are too large by.
SCALES = {Scales.K4: (0, 64), Scales.K2: (0, 16), Scales.K3: (-32, 32), Scales.K6: (-128, 128)}


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_weights_are_scale_times_code(name: str) -> None:
    f = FORMATS[name]
    least, end = SCALES[f.scales]
    rng = np.random.default_rng(3)
    codes, scales = np.meshgrid(np.arange(1 << (f.low + f.high)), np.arange(end - least))
    code, scale = codes.reshape(-1), scales.reshape(-1)
    both = np.stack((code, rng.permutation(code)), 1)
    low, high = both & (1 << f.low) - 1, both >> f.low
    # Odd tiles are 16 times as much; Q6_K's scales are a sixteenth.
    numbers = (both - f.offset) * (scale[:, None] + least) * (1 / 16 if f.scales is Scales.K6 else 1)
    for i in range(16):
        group = i * 16 // f.group
        words = filled(low, f.low, f.low * (i % (16 // f.low)), rng)
        more = filled(high, f.high, f.high * (i % (16 // f.high)), rng) if f.high else words
        at = 8 * (group % 4)
        others = rng.integers(0, 1 << 32, len(code)) & (end - least - 1) * 0x01010101 & ~(255 << at)
        out = np.zeros((len(code), 2), np.float16)
        given = [words, more, (others | scale << at).astype(np.uint32), out]
        Program(program(kernel_format(f), i, group), len(code), 0).run((0,), given)
        exact = numbers * (16 if i % 2 else 1)
        assert (out == exact.astype(np.float16)).all()
        if f.scales is not Scales.K6:
            assert (out == exact).all()
        else:
            assert np.abs(out - exact).max() <= np.abs(exact).max() * 2**-12
