"""The assembly that unpacks weights, instruction by instruction, against the codes in the planes."""

from __future__ import annotations

import pytest
import torch

from glm5deploy.quants.formats import FORMATS, Scales
from glm5deploy.quants.planes import fields_of_planes, repack
from glm5deploy.quants.products import kernel_format
from glm5deploy.quants.scales import scale_bias, scale_place, scale_text
from glm5deploy.quants.unpack import excess, tile_text
from tests.quants.blocks import QUANTISED, any_bits
from tests.quants.ptx import WORD, bf16_pair, from_float, run, to_float

# one type of each way to store codes
STORED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "Q2_K", "IQ4_XS", "MXFP4", "IQ3_S", "IQ2_XS", "Q5_1")


@pytest.mark.parametrize("name", STORED)
def test_tiles_are_the_codes(name: str) -> None:
    fmt = FORMATS[name]
    planes = repack(name, any_bits(name, 1, 256, seed=11))
    codes = fields_of_planes(planes).codes.reshape(16, 16).to(torch.int64)
    if fmt.table:
        expected = torch.tensor(fmt.table)[codes]
    elif fmt.low == 8:
        expected = codes.to(torch.uint8).view(torch.int8)
    else:
        expected = codes - fmt.offset + excess(kernel_format(fmt))
    low, high = (pairs_of_columns(plane) for plane in (planes.low, planes.low if planes.high is None else planes.high))
    for i in range(16):
        text = tile_text(kernel_format(fmt), i)
        for j in range(8):
            out = run(text, {"$1": low[i * fmt.low // 16][j], "$2": high[i * fmt.high // 16][j]})
            assert bf16_pair(out["$0"]) == expected[i, 2 * j : 2 * j + 2].tolist()


def pairs_of_columns(plane: torch.Tensor) -> list[list[int]]:
    """Registers of two neighbouring columns, [part][pair], of a plane of one row and one super-block."""
    return [[word & WORD for word in part] for part in plane.reshape(-1, 16).view(torch.int32).tolist()]


def test_a_byte_times_a_half_is_exact() -> None:
    for byte in range(4):
        for d in torch.tensor([0.0123, -7.5, 6.1e-5, 6e-8, 65504.0]).half().tolist():
            for bias in (0.0, 32.0, 128.0):
                for value in (0, 1, 63, 128, 255):
                    word = (0x11223344 & ~(255 << 8 * byte)) | value << 8 * byte
                    inputs = {"$1": word, "$2": from_float(d), "$3": from_float(d * (-32768.0 - bias))}
                    assert to_float(inputs["$3"]) == d * (-32768.0 - bias)
                    assert to_float(run(scale_text(byte), inputs)["$0"]) == (value - bias) * d


@pytest.mark.parametrize(
    "kind", [k for k in Scales if k not in (Scales.DENSE, Scales.BLOCK, Scales.BLOCK_MIN, Scales.E8)]
)
def test_groups_find_their_scale_byte(kind: Scales) -> None:
    groups = 16 if kind in (Scales.K6, Scales.K3, Scales.K2, Scales.NIBBLE16) else 8
    places = [scale_place(int(kind), g) for g in range(groups)]
    assert len(set(places)) == groups
    assert {b for _, b in places} == {0, 1, 2, 3}
    assert scale_bias(int(kind)) == {Scales.K6: 128.0, Scales.K3: 32.0, Scales.X4: 32.0}.get(kind, 0.0)


def test_every_stored_way_is_covered() -> None:
    ways = {(f.low, f.high, bool(f.table)) for f in (FORMATS[n] for n in QUANTISED)}
    tested = {(f.low, f.high, bool(f.table)) for f in (FORMATS[n] for n in STORED)}
    assert ways == tested
