"""Small GGUF files made by hand, byte by byte: sound, odd and broken ones, split the way llama-gguf-split splits.

Shares no code with the package under test. A value is (type, payload) with GGUF's type numbers; arrays have type
``ARRAY`` and payload (element type, list).
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

#: id, elements and bytes of a block of the tensor types used in tests
BLOCKS = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}

Value = tuple[int, object]
Pair = tuple[str, Value]


@dataclass(frozen=True)
class Tensor:
    name: str
    type: str
    shape: tuple[int, ...]
    seed: int = 0

    @property
    def data(self) -> bytes:
        _, elements, size = BLOCKS[self.type]
        count = 1
        for n in self.shape:
            count *= n
        return random.Random(f"{self.name}/{self.seed}").randbytes(count // elements * size)


@dataclass(frozen=True)
class Model:
    pairs: tuple[Pair, ...] = (("general.architecture", (STRING, "glm-dsa")),)
    tensors: tuple[Tensor, ...] = ()
    alignment: int = 32

    def all_pairs(self) -> tuple[Pair, ...]:
        key = () if self.alignment == 32 else (("general.alignment", (U32, self.alignment)),)
        return self.pairs + key


@dataclass(frozen=True)
class Layout:
    """Deviations from the usual way of writing a file."""

    version: int = 3
    pad_last: bool = True
    padding: bytes = b"\0"
    tail: bytes = b""
    offsets: dict[str, int] = field(default_factory=dict)
    dimensions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    types: dict[str, int] = field(default_factory=dict)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def payload(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return text(value)
    if kind == ARRAY:
        assert isinstance(value, tuple)
        element, items = value
        return struct.pack("<IQ", element, len(items)) + b"".join(payload(element, item) for item in items)
    return struct.pack("<" + CODES[kind], value)


def encode(pairs: Iterable[Pair], tensors: Sequence[Tensor], alignment: int, layout: Layout | None = None) -> bytes:
    """A whole file. ``alignment`` is what is laid out by; whether a key says so is up to ``pairs``."""
    layout = layout or Layout()
    pairs = list(pairs)
    head = b"GGUF" + struct.pack("<IQQ", layout.version, len(tensors), len(pairs))
    for key, (kind, value) in pairs:
        head += text(key) + struct.pack("<I", kind) + payload(kind, value)
    body = b""
    for index, tensor in enumerate(tensors):
        shape = layout.dimensions.get(tensor.name, tensor.shape)
        head += text(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        kind = layout.types.get(tensor.name, BLOCKS[tensor.type][0])
        head += struct.pack("<IQ", kind, layout.offsets.get(tensor.name, len(body)))
        body += tensor.data
        if index + 1 < len(tensors) or layout.pad_last:
            body += layout.padding * (-len(body) % alignment)
    return head + b"\0" * (-len(head) % alignment) + body + layout.tail


def split_pairs(number: int, count: int, total: int) -> tuple[Pair, ...]:
    return (("split.no", (U16, number)), ("split.tensors.count", (I32, total)), ("split.count", (U16, count)))


def write_split(
    model: Model,
    folder: Path,
    sizes: Sequence[int],
    *,
    prefix: str = "tiny",
    layouts: dict[int, Layout] | None = None,
    extra: dict[int, tuple[Pair, ...]] | None = None,
) -> list[Path]:
    """Write ``model`` as shards with ``sizes[i]`` tensors each; ``layouts`` and ``extra`` pairs by shard from 0."""
    assert sum(sizes) == len(model.tensors)
    folder.mkdir(parents=True, exist_ok=True)
    paths, begin, count = [], 0, len(sizes)
    for number, size in enumerate(sizes):
        own = model.all_pairs() if number == 0 else ()
        own += (extra or {}).get(number, ()) + split_pairs(number, count, len(model.tensors))
        data = encode(own, model.tensors[begin : begin + size], model.alignment, (layouts or {}).get(number))
        path = folder / f"{prefix}-{number + 1:05}-of-{count:05}.gguf"
        path.write_bytes(data)
        paths.append(path)
        begin += size
    return paths


def merged_bytes(model: Model) -> bytes:
    """What a right merge of any split of ``model`` gives."""
    pairs = (*model.all_pairs(), *split_pairs(0, 0, len(model.tensors)))
    tensors = [replace(t, shape=_trimmed(t.shape)) for t in model.tensors]
    return encode(pairs, tensors, model.alignment)


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def small_model(*, layers: int = 4, alignment: int = 32, quant: str = "Q4_K", width: int = 256) -> Model:
    """A model with a glm-like mix of kinds: about 350 kB at the default width."""
    tensors = [Tensor("token_embd.weight", "Q6_K", (width, 64))]
    for block in range(layers):
        for kind, type_name, shape in (
            ("attn_norm.weight", "F32", (width,)),
            ("attn_q_a.weight", quant, (width, 32)),
            ("attn_q_b.weight", quant, (width, 24)),
            ("attn_output.weight", quant, (width, 40)),
            ("ffn_down.weight", "Q6_K" if block % 2 else quant, (width, 16)),
            ("ffn_up.weight", quant, (width, 16)),
            ("odd.bias", "F32", (7 + block,)),
        ):
            tensors.append(Tensor(f"blk.{block}.{kind}", type_name, shape))
    tensors.append(Tensor("output.weight", "Q6_K", (width, 64)))
    pairs: tuple[Pair, ...] = (
        ("general.architecture", (STRING, "glm-dsa")),
        ("glm-dsa.block_count", (U32, layers)),
        ("tokenizer.ggml.tokens", (ARRAY, (STRING, ["a", "", "Ġb", "ü"]))),
        ("tokenizer.ggml.scores", (ARRAY, (F32, [0.5, -1.0]))),
        ("glm-dsa.empty", (ARRAY, (I32, []))),
        ("glm-dsa.flag", (BOOL, True)),
    )
    return Model(pairs, tuple(tensors), alignment)
