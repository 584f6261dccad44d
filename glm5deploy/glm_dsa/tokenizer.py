"""``tokenizer.json`` and ``tokenizer_config.json``, rebuilt from GGUF metadata as plain JSON.

GLM's tokenizer is a byte-level BPE; the metadata hold vocabulary, token types and merges, which is all that decides
ids. Whether a control token survives ``skip_special_tokens`` follows its type, the only trace in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.hf_config import Json, eos_token_ids, pad_token_id
from glm5deploy.glm_dsa.metadata import Metadata, describe, is_array, missing, read_string

# Token types of GGUF: a normal token is BPE vocabulary, control and user-defined ones are matched before BPE,
# unused ones fill the embedding matrix and are no text at all.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

# llama.cpp knows GLM's pre-tokenizer by these names; both are the same splitting of text before BPE.
_PRE_TOKENIZERS = ("glm4", "chatglm-bpe")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A checked token list: ``types[i]`` is the GGUF type of ``tokens[i]``, ``merges`` are pairs of known pieces."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]

    def of_type(self, *types: int) -> list[tuple[int, str]]:
        return [(i, self.tokens[i]) for i, kind in enumerate(self.types) if kind in types]


def read_vocabulary(metadata: Metadata, vocab_size: int) -> Vocabulary:
    """The vocabulary of ``vocab_size`` tokens; raises :class:`FileFormatError` for anything but GLM's tokenizer."""
    model = read_string(metadata, "tokenizer.ggml.model")
    if model != "gpt2":
        raise FileFormatError(f"tokenizer.ggml.model is {describe(model)}; GLM-5 has a byte-level BPE ('gpt2')")
    pre = read_string(metadata, "tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise FileFormatError(
            f"tokenizer.ggml.pre is {describe(pre)}; GLM-5 has {' or '.join(map(repr, _PRE_TOKENIZERS))}, "
            "and any other splitting would give other ids",
            hint="Take a GGUF converted with GLM's own tokenizer.",
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(tokens) != vocab_size:
        raise FileFormatError(f"tokenizer.ggml.tokens has {len(tokens)} tokens for a vocabulary of {vocab_size}")
    types = _types(metadata, len(tokens))
    pieces = frozenset(token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL)
    vocabulary = Vocabulary(tokens, types, _merges(metadata, pieces))
    _require_distinct(vocabulary)
    return vocabulary


def build_tokenizer(vocabulary: Vocabulary) -> Json:
    """``tokenizer.json`` in the format of the ``tokenizers`` library."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": vocabulary.types[token_id] == _CONTROL,
            }
            for token_id, token in vocabulary.of_type(_CONTROL, _USER_DEFINED)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: token_id for token_id, token in vocabulary.of_type(_NORMAL)},
            "merges": [list(pair) for pair in vocabulary.merges],
        },
    }


def build_tokenizer_config(vocabulary: Vocabulary, metadata: Metadata, context_length: int) -> Json:
    """``tokenizer_config.json``. There is no bos token: GLM's template writes ``[gMASK]<sop>`` itself, and the bos id
    in GGUF files is the converter's invention."""
    size = len(vocabulary.tokens)
    return {
        "tokenizer_class": "TokenizersBackend",
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "eos_token": vocabulary.tokens[eos_token_ids(metadata, size)[0]],
        "pad_token": vocabulary.tokens[pad_token_id(metadata, size)],
        "extra_special_tokens": [token for _, token in vocabulary.of_type(_CONTROL)],
        "model_max_length": context_length,
        "padding_side": "left",
    }


def _strings(metadata: Metadata, key: str) -> tuple[str, ...]:
    value = metadata.get(key)
    if value is None:
        raise missing(key)
    if not is_array(value) or not all(isinstance(item, str) for item in value):
        raise FileFormatError(f"metadata key {key} must be an array of strings, the file holds {describe(value)}")
    return tuple(str(item) for item in value)


def _types(metadata: Metadata, count: int) -> tuple[int, ...]:
    key = "tokenizer.ggml.token_type"
    value = metadata.get(key)
    if value is None:
        raise missing(key)
    known = (_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED)
    if not is_array(value) or len(value) != count:
        raise FileFormatError(f"metadata key {key} must have one entry per token ({count})")
    types = []
    for token_id, kind in enumerate(value):
        if isinstance(kind, bool) or not isinstance(kind, int) or kind not in known:
            raise FileFormatError(f"{key}[{token_id}] is {describe(kind)}; a byte-level BPE has types {known}")
        types.append(kind)
    return tuple(types)


def _merges(metadata: Metadata, known: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Pairs in order of rank. In the byte-level alphabet a space is ``Ġ``, so the one space separates the pair."""
    key = "tokenizer.ggml.merges"
    pairs = []
    for rank, merge in enumerate(_strings(metadata, key)):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            raise FileFormatError(f"{key}[{rank}] is {describe(merge)}, not two pieces with a space between")
        unknown = [piece for piece in (left, right, left + right) if piece not in known]
        if unknown:
            raise FileFormatError(f"{key}[{rank}] is {describe(merge)}, but {describe(unknown[0])} is no token")
        pairs.append((left, right))
    return tuple(pairs)


def _require_distinct(vocabulary: Vocabulary) -> None:
    seen: dict[str, int] = {}
    for token_id, token in vocabulary.of_type(_NORMAL, _CONTROL, _USER_DEFINED):
        if token in seen:
            raise FileFormatError(f"tokens {seen[token]} and {token_id} are both {describe(token)}")
        seen[token] = token_id
    absent = _missing_bytes([token for _, token in vocabulary.of_type(_NORMAL)])
    if absent:
        raise FileFormatError(f"{len(absent)} single bytes are no token, first 0x{absent[0]:02x}: not a byte-level BPE")


def _missing_bytes(pieces: Sequence[str]) -> list[int]:
    known = frozenset(pieces)
    return [byte for byte, letter in enumerate(byte_alphabet()) if letter not in known]


def byte_alphabet() -> tuple[str, ...]:
    """The printable character that stands for each of the 256 bytes in a byte-level BPE (OpenAI's GPT-2 encoder):
    printable Latin-1 for itself, the others counted up from U+0100."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in itself else chr(next(others)) for byte in range(256))
