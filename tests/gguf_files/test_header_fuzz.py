"""No input may do anything but give a header or our error: not crash, not hang, not allocate out of proportion."""

from __future__ import annotations

import runpy
import struct
import tracemalloc
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.header import parse_header
from tests.support.data import REPOSITORY
from tests.support.gguf_factory import encode, small_model

WHOLE = encode(small_model(layers=2).pairs, small_model(layers=2).tensors, 32)
HEADER_BYTES = parse_header(lambda at, n: WHOLE[at : at + n], len(WHOLE), "x").data_start

#: values that lengths and counts go wrong with
NASTY = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def read_everything(data: bytes) -> None:
    """Read a header and decode every value: succeeds or raises :class:`FileFormatError`, within bounds."""
    message = "x: "
    tracemalloc.start()
    try:
        header = parse_header(lambda at, n: data[at : at + n], len(data), "x")
        for tensor in header.tensors:
            assert header.data_start + tensor.offset + tensor.nbytes <= len(data)
        dict(header.metadata)
    except FileFormatError as error:
        message = error.message
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert message.startswith("x: ")
    assert len(message) < 5000
    assert peak < 20 * len(data) + (1 << 20)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
@example(b"GGUF" + struct.pack("<IQQ", 3, 2**17, 2**16))
def test_any_bytes(data: bytes) -> None:
    read_everything(b"GGUF\3\0\0\0" + data)
    read_everything(data)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    read_everything(bytes(data))


@settings(max_examples=200, deadline=None)
@given(st.integers(4, HEADER_BYTES - 8), st.sampled_from(NASTY), st.sampled_from(["<Q", "<I"]))
def test_numbers_gone_wrong(at: int, number: int, code: str) -> None:
    data = bytearray(WHOLE)
    struct.pack_into(code, data, at, number & (2 ** (8 * struct.calcsize(code)) - 1))
    read_everything(bytes(data))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(WHOLE)), st.integers(0, HEADER_BYTES), st.integers(0, HEADER_BYTES))
def test_cut_and_spliced(end: int, start: int, stop: int) -> None:
    read_everything(WHOLE[:end])
    read_everything(WHOLE[:start] + WHOLE[stop:])


def test_many_tiny_strings_cost_a_few_times_the_file() -> None:
    count = 50_000
    array = struct.pack("<IIQ", 9, 8, count) + bytes(8 * count)
    read_everything(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + array + bytes(64))


def test_the_seeds_of_the_longer_fuzzing_are_sound(tmp_path: Path) -> None:
    """scripts/fuzz_header.py starts from files that read without an error, whatever happens to it meanwhile."""
    target = runpy.run_path(str(REPOSITORY / "scripts" / "fuzz_header.py"))
    target["write_seeds"](tmp_path)
    seeds = sorted(tmp_path.iterdir())
    assert len(seeds) == 5
    for seed in seeds:
        target["read"](seed.read_bytes())
        target["one_input"](seed.read_bytes()[:-1])
