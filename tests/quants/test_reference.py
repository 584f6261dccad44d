"""Dequantisation equals gguf-py's in every bit, from the file's blocks and from planes."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.quants import formats, planes, reference
from tests.quants.blocks import QUANTISED, TYPES, adversarial, any_bits, random_rows, row_bytes


def gguf_values(name: str, raw: torch.Tensor) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name])


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    nan = np.isnan(theirs)
    assert np.array_equal(torch.isnan(ours).numpy(), nan)
    # codebook types multiply by the sign last: a zero of the other sign is the same weight
    a, b = np.where(nan, 0, ours.numpy()) + np.float32(0), np.where(nan, 0, theirs) + np.float32(0)
    assert np.array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("columns", [256, 1536])
def test_random_blocks(name: str, columns: int) -> None:
    raw = random_rows(name, 17, columns)
    assert_same_bits(reference.dequantize(name, raw), gguf_values(name, raw))


@pytest.mark.parametrize("name", TYPES)
def test_any_bit_pattern(name: str) -> None:
    raw = any_bits(name, 64, 1024, seed=3)
    assert_same_bits(reference.dequantize(name, raw), gguf_values(name, raw))


@pytest.mark.parametrize("name", TYPES)
def test_adversarial_blocks(name: str) -> None:
    raw = adversarial(name)
    assert_same_bits(reference.dequantize(name, raw), gguf_values(name, raw))


@pytest.mark.parametrize("name", QUANTISED)
def test_planes_hold_the_same_values(name: str) -> None:
    for raw in (any_bits(name, 33, 768, seed=5), adversarial(name)):
        packed = planes.repack(name, raw)
        assert_same_bits(reference.dequantize_planes(packed)[0], gguf_values(name, raw))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dense_planes_round_to_bf16(name: str) -> None:
    raw = random_rows(name, 5, 300)
    expected = torch.from_numpy(gguf_values(name, raw).copy()).to(torch.bfloat16).float()
    assert torch.equal(reference.dequantize_planes(planes.repack(name, raw))[0], expected)


@pytest.mark.parametrize("name", [n for n in QUANTISED if not formats.FORMATS[n].transcoded])
def test_layout_round_trip_returns_the_files_bytes(name: str) -> None:
    for raw in (any_bits(name, 21, 1280, seed=9), adversarial(name)):
        packed = planes.repack(name, raw)
        assert torch.equal(planes.restore(packed)[0], raw)


@pytest.mark.parametrize("name", [n for n in QUANTISED if formats.FORMATS[n].block_elements == 32])
@pytest.mark.parametrize("columns", [32, 96, 288])
def test_rows_that_end_inside_a_super_block(name: str, columns: int) -> None:
    raw = random_rows(name, 6, columns)
    packed = planes.repack(name, raw, columns)
    assert torch.equal(planes.restore(packed)[0], raw)
    assert_same_bits(reference.dequantize_planes(packed)[0], gguf_values(name, raw))


@pytest.mark.parametrize("name", QUANTISED)
def test_bytes_in_memory(name: str) -> None:
    fmt = formats.FORMATS[name]
    packed = planes.repack(name, any_bits(name, 64, 2048, seed=1))
    assert packed.nbytes == formats.plane_nbytes(name, 64, 2048) == round(64 * row_bytes(name, 2048) * fmt.growth)
    if not fmt.transcoded:
        assert packed.nbytes <= 1.03 * 64 * row_bytes(name, 2048)
    assert all(t.is_contiguous() and t.shape[0] == 1 for t in packed.tensors)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ2_XS", "MXFP4", "BF16"])
def test_experts_are_packed_one_by_one(name: str) -> None:
    raw = torch.stack([random_rows(name, 8, 512, seed=s) for s in range(3)])
    whole = planes.repack(name, raw)
    filled = planes.empty_planes(name, 8, 512, experts=3)
    for e in range(3):
        filled.slice(e, e + 1).copy_(planes.repack(name, raw[e]))
    for a, b in zip(whole.tensors, filled.tensors, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with pytest.raises(ValueError, match="planes differ"):
        filled.slice(0, 1).copy_(planes.repack(name, raw[0, :4]))


def test_sizes_are_those_of_gguf() -> None:
    for name, fmt in formats.FORMATS.items():
        assert (fmt.block_elements, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]


def test_types_without_a_kernel_are_refused_by_name() -> None:
    for name in sorted(set(TYPES_BY_NAME) - set(formats.FORMATS)):
        with pytest.raises(FileFormatError, match=f"type {name}"):
            formats.format_of(name)
    for type_id, name in ((40, "NVFP4"), (34, "TQ1_0"), (139, "IQ4_K"), (42, "Q2_0")):
        with pytest.raises(FileFormatError, match=name):
            formats.format_by_id(type_id)


def test_rows_of_broken_blocks_are_refused() -> None:
    raw = random_rows("Q4_K", 2, 512)
    with pytest.raises(FileFormatError, match="no whole Q4_K blocks"):
        planes.repack("Q4_K", raw[:, :-1])
    with pytest.raises(FileFormatError, match="hold 512 weights, not 768"):
        planes.repack("Q4_K", raw, 768)
