"""The assembly that unpacks bytes of the packed cache, run instruction by instruction over every e4m3 number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import glm5deploy.kernels
from tests.quants.ptx import bf16_pair, run

FROM = Path(glm5deploy.kernels.__file__).parent


def assembly(module: str, function: str) -> str:
    """The first block of assembly of a device function."""
    source = (FROM / f"{module}.py").read_text()
    found = re.search(rf'def {function}\(.*?inline_asm_elementwise\(\s*"""(.*?)"""', source, re.DOTALL)
    assert found is not None
    return found[1]


def bf16_twice(number: float) -> int:
    half = torch.tensor(number).bfloat16().view(torch.int16).item() & 0xFFFF
    return half | half << 16


@pytest.mark.parametrize(
    ("module", "function", "scale"), [("fp8", "e4m3_to_bf16", 1.0), ("sparse_mla_hopper_rows", "unpack", 0.25)]
)
def test_bytes_become_bf16_four_at_a_time(module: str, function: str, scale: float) -> None:
    text = assembly(module, function)
    factor = bf16_twice(scale * 2.0**120)
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    codes += codes[:2]
    values = (torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scale).tolist()
    for first in range(0, len(codes), 4):
        word = int.from_bytes(bytes(codes[first : first + 4]), "little")
        out = run(text, {"$2": word, "$3": factor, "$4": factor})
        assert bf16_pair(out["$0"]) + bf16_pair(out["$1"]) == values[first : first + 4]
