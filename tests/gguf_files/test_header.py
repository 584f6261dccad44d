from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf
import pytest

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.header import Header, parse_header, read_header
from glm5deploy.gguf_files.metadata import ValueType
from glm5deploy.gguf_files.reader import HeaderIncompleteError
from tests.support.data import tiny_glm5
from tests.support.gguf_factory import (
    ARRAY,
    BOOL,
    F32,
    F64,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    Layout,
    Model,
    Pair,
    Tensor,
    encode,
    small_model,
    text,
)

TWO = (Tensor("a", "F32", (8,)), Tensor("b", "Q8_0", (32, 3)))


def parse(data: bytes, name: str = "x.gguf") -> Header:
    return parse_header(lambda at, length: data[at : at + length], len(data), name)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return path


def test_every_handed_file_reads_as_gguf_py_reads_it() -> None:
    files = sorted(tiny_glm5().rglob("*.gguf"))
    assert len(files) == 8
    for path in files:
        header, reader = read_header(path), gguf.GGUFReader(path)
        theirs = {k: f for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        assert list(header.metadata) == list(theirs)
        for key, field in theirs.items():
            value = field.contents()
            assert header.metadata[key] == (tuple(value) if isinstance(value, list) else value), key
        ours = [(t.name, t.type.name, list(t.shape), header.data_start + t.offset, t.nbytes) for t in header.tensors]
        assert ours == [
            (t.name, t.tensor_type.name, t.shape.tolist(), t.data_offset, t.n_bytes) for t in reader.tensors
        ]


def test_values_of_every_type() -> None:
    pairs: tuple[Pair, ...] = (
        ("u8", (U8, 200)),
        ("i64", (I64, -(2**62))),
        ("u64", (U64, 2**63)),
        ("f32", (F32, 0.5)),
        ("f64", (F64, -1e300)),
        ("yes", (BOOL, True)),
        ("text", (STRING, "Ġ\0ü")),
        ("empty", (STRING, "")),
        ("none", (ARRAY, (STRING, []))),
        ("flags", (ARRAY, (BOOL, [True, False]))),
        ("numbers", (ARRAY, (I32, [1, -2, 3]))),
        ("words", (ARRAY, (STRING, ["", "a", "bc"]))),
    )
    header = parse_header(lambda at, n: data[at : at + n], len(data := encode(pairs, TWO, 32)), "x")
    expected = {k: tuple(v[1]) if kind == ARRAY else v for k, (kind, v) in pairs}  # type: ignore[index]
    assert dict(header.metadata) == expected
    assert header.metadata.entries["words"].element_type is ValueType.STRING
    assert header.metadata.integer("u8") == 200
    assert header.metadata.integer("absent", 7) == 7
    with pytest.raises(FileFormatError, match=r"yes at offset .* must be an integer, but is bool"):
        header.metadata.integer("yes")


def test_a_string_that_is_not_utf8_is_an_error_only_when_asked_for() -> None:
    data = encode((("name", (STRING, b"\xff\xfe")), ("ok", (U8, 1))), TWO, 32)
    header = parse_header(lambda at, n: data[at : at + n], len(data), "x")
    assert header.metadata["ok"] == 1
    assert header.metadata.raw("name").endswith(b"\xff\xfe")
    with pytest.raises(FileFormatError, match=r"name: the string at offset .* is not UTF-8"):
        header.metadata["name"]


def _raw(tensors: int = 0, pairs: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


BROKEN = {
    "empty": (b"", "at offset 0: the magic number needs 4 bytes, but the file ends at 0"),
    "not gguf": (b"PK\3\4" + bytes(60), "expected the magic number b'GGUF'"),
    "version 1": (_raw(version=1) + bytes(64), "at offset 4: GGUF version 1 cannot be read"),
    "version 4": (_raw(version=4) + bytes(64), "at offset 4: GGUF version 4 cannot be read"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "at offset 4: this is a big-endian GGUF file"),
    "count of tensors": (_raw(tensors=2**60) + bytes(64), "at offset 8: 1152921504606846976 tensors cannot be"),
    "count of keys": (_raw(pairs=2**63) + bytes(64), "at offset 16: 9223372036854775808 keys cannot be"),
    "key length": (_raw(pairs=1, body=struct.pack("<Q", 2**62) + bytes(64)), "must have 1 to 65535 bytes"),
    "empty key": (_raw(pairs=1, body=_pair("", U8, b"\1") + bytes(64)), "must have 1 to 65535 bytes"),
    "key with NUL": (_raw(pairs=1, body=_pair("a\0b", U8, b"\1") + bytes(64)), "contains a NUL byte"),
    "key twice": (
        _raw(pairs=2, body=_pair("k", U8, b"\1") * 2 + bytes(64)),
        "key 'k' appears twice",
    ),
    "value type": (_raw(pairs=1, body=_pair("k", 13, b"\1") + bytes(64)), "has value type 13, expected 0 to 12"),
    "nested array": (
        _raw(pairs=1, body=_pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)) + bytes(64)),
        "is an array of arrays",
    ),
    "array length": (
        _raw(pairs=1, body=_pair("k", ARRAY, struct.pack("<IQ", U64, 2**61)) + bytes(64)),
        "claims 2305843009213693952 elements of uint64",
    ),
    "string array length": (
        _raw(pairs=1, body=_pair("k", ARRAY, struct.pack("<IQ", STRING, 2**40)) + bytes(64)),
        "claims 1099511627776 elements of string",
    ),
    "string length": (
        _raw(pairs=1, body=_pair("k", STRING, struct.pack("<Q", 2**64 - 1)) + bytes(64)),
        "a string of key 'k' needs 18446744073709551615 bytes, but the file ends at",
    ),
    "alignment 0": (encode((("general.alignment", (U32, 0)),), TWO, 32), "a uint32 power of two from 8 to"),
    "alignment 48": (encode((("general.alignment", (U32, 48)),), TWO, 32), "but is 48"),
    "alignment 2^31": (encode((("general.alignment", (U32, 1 << 31)),), TWO, 32), "but is 2147483648"),
    "alignment u64": (encode((("general.alignment", (U64, 32)),), TWO, 32), "but is uint64"),
    "alignment text": (encode((("general.alignment", (STRING, "32")),), TWO, 32), "but is string"),
    "tensor twice": (encode((), (TWO[0], TWO[0]), 32), "tensor 'a' appears twice in this file"),
    "tensor name": (encode((), (Tensor("n" * 65, "F32", (8,)),), 32), "must have 1 to 64 bytes, but its length is 65"),
    "5 dimensions": (encode((), TWO, 32, Layout(dimensions={"a": (1,) * 5})), "has 5 dimensions, expected at most 4"),
    "dimension 0": (encode((), TWO, 32, Layout(dimensions={"a": (8, 0)})), "has shape [8, 0]"),
    "dimension 2^63": (encode((), TWO, 32, Layout(dimensions={"a": (2**63,)})), "has shape [9223372036854775808]"),
    "dimensions that wrap": (
        encode((), TWO, 32, Layout(dimensions={"a": (2**40, 2**40)})),
        "needs 4835703278458516698824704 bytes, but the file ends at",
    ),
    "unknown type": (encode((), TWO, 32, Layout(types={"b": 139})), "tensor 'b': unsupported tensor type IQ4_K"),
    "half a block": (
        encode((), (Tensor("q", "F32", (33,)),), 32, Layout(types={"q": 8})),
        "rows of 33, not",
    ),
    "unaligned": (encode((), TWO, 32, Layout(offsets={"b": 40})), "tensor 'b' is not aligned to 32 bytes"),
    "overlap": (encode((), TWO, 32, Layout(offsets={"b": 0})), "tensor 'b' overlaps 'a', which ends at"),
    "out of range": (
        encode((), TWO, 32, Layout(offsets={"b": 2**40})),
        "tensor 'b' needs 102 bytes, but",
    ),
    "two files": (encode((), TWO, 32) * 2, "another GGUF file is appended after the tensor data"),
    "two files, unpadded": (
        encode((), TWO, 32, Layout(pad_last=False)) + encode((), TWO, 32),
        "another GGUF file is appended",
    ),
    "two headers": (encode((("k", (U8, 1)),), (), 32) * 2, "another GGUF file is appended"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_name_file_offset_and_expectation(tmp_path: Path, case: str) -> None:
    data, words = BROKEN[case]
    path = write(tmp_path, data)
    with pytest.raises(FileFormatError) as caught:
        read_header(path)
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{path}: ")


def test_a_byte_less_is_noticed_and_bytes_more_are_not_minded(tmp_path: Path) -> None:
    data = encode((), TWO, 32, Layout(pad_last=False))
    whole = read_header(write(tmp_path, data))
    assert whole.data_end == len(data)
    assert read_header(write(tmp_path, data + bytes(1000))).tensors == whole.tensors
    with pytest.raises(FileFormatError, match="'b' needs 102 bytes, but the file ends at"):
        read_header(write(tmp_path, data[:-1]))


def test_every_truncation_of_a_header_is_our_error() -> None:
    data = encode(small_model(layers=1).pairs, small_model(layers=1).tensors, 32)
    end = parse(data).data_start
    for cut in range(end):
        with pytest.raises(FileFormatError):
            parse(data[:cut])


def test_a_prefix_says_how_much_more_it_needs() -> None:
    data = encode(small_model().pairs, small_model().tensors, 32)
    whole = parse(data)
    have, steps = 0, 0
    while have < len(whole.raw):
        prefix = data[:have]
        with pytest.raises(HeaderIncompleteError) as caught:
            parse_header(lambda at, n, prefix=prefix: prefix[at : at + n], len(data), "x")
        assert have < caught.value.needed <= len(whole.raw)
        have, steps = caught.value.needed, steps + 1
    prefix = data[:have]
    assert parse_header(lambda at, n: prefix[at : at + n], len(data), "x").tensors == whole.tensors
    assert steps > 10


def test_only_the_header_is_read() -> None:
    data = encode(small_model().pairs, (*small_model().tensors, Tensor("big", "F32", (1 << 20,))), 32)
    reads: list[tuple[int, int]] = []

    def read_at(at: int, length: int) -> bytes:
        reads.append((at, length))
        return data[at : at + length]

    parse_header(read_at, len(data), "x")
    assert sum(length for _, length in reads) <= 64 << 10


def test_short_reads_are_continued() -> None:
    data = encode(small_model().pairs, small_model().tensors, 32)
    header = parse_header(lambda at, n: data[at : at + min(n, 7)], len(data), "x")
    assert header.tensors == parse(data).tensors


def test_version_2_and_layout_freedoms_are_read() -> None:
    data = encode((), TWO, 32, Layout(version=2, offsets={"a": 128, "b": 0}))
    header = parse_header(lambda at, n: (data + bytes(128))[at : at + n], len(data) + 128, "x")
    assert (header.version, [t.offset for t in header.tensors]) == (2, [128, 0])


def test_not_a_regular_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, words in ((tmp_path / "pipe.gguf", "is not a regular file"), (tmp_path / "no.gguf", "No such file")):
        with pytest.raises(FileFormatError, match=words):
            read_header(path)


def test_the_vocabulary_of_the_real_model_reads_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(154_880)]
    merges = [f"ab{i} cd{i}" for i in range(321_649)]
    model = Model((("tokens", (ARRAY, (STRING, tokens))), ("merges", (ARRAY, (STRING, merges)))), TWO)
    path = write(tmp_path, encode(model.pairs, model.tensors, 32))
    begin = time.process_time()
    header = read_header(path)
    assert header.metadata["tokens"] == tuple(tokens)
    assert time.process_time() - begin < 2, "CPU seconds; half a second is usual"
    assert header.metadata["merges"] == tuple(merges)


def test_u16_alignment_of_arrays_is_not_confused_with_scalars() -> None:
    data = encode((("general.alignment", (ARRAY, (U16, [32]))),), TWO, 32)
    with pytest.raises(FileFormatError, match="but is array"):
        parse(data)
