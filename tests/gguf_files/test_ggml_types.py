from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES, TYPES_BY_NAME, ggml_type

#: in gguf-py's list, but never the type of a stored weight, or not supported by anything downstream
REFUSED = {"Q8_1", "Q8_K", "Q1_0"}


def test_sizes_equal_gguf_py() -> None:
    theirs = {t.name: (t.value, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType if t.name not in REFUSED}
    ours = {t.name: (t.id, t.block_elements, t.block_bytes) for t in TYPES.values()}
    assert ours == theirs


def test_bytes_and_bits() -> None:
    kind = TYPES_BY_NAME["Q4_K"]
    assert kind.nbytes(512) == 288
    assert kind.bits_per_weight == 4.5


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (137, "IQ2_K (id 137): a type of the ik_llama.cpp fork"),
        (203, "type 203 (id 203): a type of the ik_llama.cpp fork"),
        (41, "Q1_0"),
        (42, "Q2_0"),
        (31, "Q4_0_4_4 (id 31): removed"),
        (9, "Q8_1 (id 9): a format for activations"),
        (99, "unknown to llama.cpp"),
        (2**32 - 1, "unknown to llama.cpp"),
    ],
)
def test_other_types_are_refused_by_name(number: int, words: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        ggml_type(number)
    assert words in caught.value.message
    assert caught.value.hint
