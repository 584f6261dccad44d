"""Weights in fp16 as the assembly of products with integers makes them: every code with every scale, in every tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from glm5deploy.quants.arguments import kernel_format
from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.integer_text import interleaved, pair_text, tile_text
from glm5deploy.quants.scales import has_minimum
from tests.kernels.ptx_program import Program


def program(fmt: tuple[Any, ...], i: int, group: int) -> str:
    """A kernel whose thread takes words of the planes and two of scale bytes, and gives a pair of weights."""
    high, minima = fmt[1] > 0, has_minimum(fmt[3])
    results = ["%r5", "%r6"] if minima else ["%r5"]
    pair = replaced(pair_text(fmt, group // 2 * 2), [*results, "%r3", "%r4"])
    planes = ["%r1", "%r2"] if high else ["%r1"]
    tile = replaced(tile_text(fmt, i), ["%r7", *planes, "%r5", "%r5", "%r6", "%r6"])
    loads = [f"ld.param.b64 %rd{k}, [parameter_{k}];" for k in range(5)]
    loads += [f"mad.wide.u32 %rd{k + 5}, %r0, 4, %rd{k};" for k in range(5)]
    loads += [f"ld.global.b32 %r{k + 1}, [%rd{k + 5}];" for k in range(4)]
    body = [*loads, pair, tile, "st.global.b32 [%rd9], %r7;", "ret;"]
    return "\n{\nmov.u32 %r0, %tid.x;\n" + "\n".join(body) + "\n}"


def replaced(text: str, operands: list[str]) -> str:
    for k in reversed(range(len(operands))):
        text = text.replace(f"${k}", operands[k])
    return text


def filled(bits: Any, width: int, at: int, rng: np.random.Generator) -> Any:
    """Words whose halves have `bits` [words, 2] of `width` from bit `at` on, and anything elsewhere."""
    noise = rng.integers(0, 1 << 16, bits.shape)
    halves = noise & ~(((1 << width) - 1) << at) | bits << at
    return (halves[:, 0] | halves[:, 1] << 16).astype(np.uint32)


# Scales' numbers from their bytes. A nibble n stands for n + 1/2, here twice; Q6_K's are a sixteenth.
SCALES = {
    Scales.K4: np.arange(64.0), Scales.K2: np.arange(16.0), Scales.K3: np.arange(64.0) - 32,
    Scales.K6: (np.arange(256.0) - 128) / 16, Scales.X4: np.arange(64.0) - 32,
    Scales.NIBBLE: 2 * np.arange(16.0) + 1, Scales.NIBBLE16: 2 * np.arange(16.0) + 1,
}  # fmt: skip
ROUNDED = (Scales.K6, Scales.X4)  # products of up to 13 bits


@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if f.scales in SCALES])
def test_weights_are_scale_times_code(name: str) -> None:
    f = FORMATS[name]
    fmt = kernel_format(f)
    numbers = SCALES[f.scales]
    rng = np.random.default_rng(3)
    codes, scales = np.meshgrid(np.arange(1 << (f.low + f.high)), np.arange(len(numbers)))
    code, scale = codes.reshape(-1), scales.reshape(-1)
    both = np.stack((code, rng.permutation(code)), 1)
    low, high = both & (1 << f.low) - 1, both >> f.low
    values = np.array(f.table)[both] if f.table else both - f.offset
    for i in range(16):
        group = i * 16 // f.group
        words = filled(low, f.low, f.low * (i % (16 // f.low)), rng)
        more = filled(high, f.high, f.high * (i % (16 // f.high)), rng) if f.high else words
        word, byte = (group % 2, group % 8 // 2) if interleaved(fmt) else (0, group % 4)
        given = [rng.integers(0, 1 << 32, len(code)) & (len(numbers) - 1) * 0x01010101 for _ in range(2)]
        given[word] = given[word] & ~(255 << 8 * byte) | scale << 8 * byte
        out = np.zeros((len(code), 2), np.float16)
        Program(program(fmt, i, group), len(code), 0).run(
            (0,), [words, more, *(g.astype(np.uint32) for g in given), out]
        )
        exact = values * numbers[scale][:, None] * (16 if i % 2 else 1)
        assert (out == exact.astype(np.float16)).all()
        if f.scales in ROUNDED:
            assert np.abs(out - exact).max() <= np.abs(exact).max() * 2**-11
        else:
            assert (out == exact).all()
