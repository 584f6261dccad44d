"""Tokenizers that are not GLM's, and damaged ones, are refused with the key and the entry at fault."""

from __future__ import annotations

import pytest

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.chat_template import LARGEST_TEMPLATE, read_chat_template, template_environment
from glm5deploy.glm_dsa.hf_config import build_generation_config, eos_token_ids, pad_token_id
from glm5deploy.glm_dsa.tokenizer import build_tokenizer, byte_alphabet, read_vocabulary

BYTES = list(byte_alphabet())


def metadata(**changes):
    keys = {
        "model": "gpt2",
        "pre": "glm4",
        "tokens": [*BYTES, "ab", "<|endoftext|>", "<think>", "[PAD259]"],
        "token_type": [1] * 257 + [3, 4, 5],
        "merges": ["a b"],
        "eos_token_id": 257,
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def test_byte_alphabet_is_the_one_tokenizers_uses():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(BYTES) == sorted(ByteLevel.alphabet())
    assert (BYTES[0x20], BYTES[0x0A], BYTES[0x41], BYTES[0xFF]) == ("Ġ", "Ċ", "A", "ÿ")


def test_types_decide_what_becomes_of_a_token():
    tokenizer = build_tokenizer(read_vocabulary(metadata(), 260))
    assert [(t["id"], t["content"], t["special"]) for t in tokenizer["added_tokens"]] == [
        (257, "<|endoftext|>", True),
        (258, "<think>", False),
    ]
    assert len(tokenizer["model"]["vocab"]) == 257
    assert "[PAD259]" not in tokenizer["model"]["vocab"]
    assert tokenizer["model"]["merges"] == [["a", "b"]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1] * 260}, "tokens must be an array of strings"),
        ({"tokens": BYTES}, "256 tokens for a vocabulary of 260"),
        ({"token_type": None}, "token_type is missing"),
        ({"token_type": [1] * 3}, "one entry per token"),
        ({"token_type": [6] + [1] * 259}, r"token_type\[0\] is 6"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, r"merges\[0\] is 'ab', not two pieces"),
        ({"merges": ["a b c"]}, "not two pieces"),
        ({"merges": ["a c"]}, "'ac' is no token"),
        ({"merges": ["a b", "x yz"]}, r"merges\[1\].*'yz' is no token"),
        (
            {"tokens": [*BYTES, "a", "<|endoftext|>", "<think>", "[PAD259]"], "merges": []},
            "tokens 97 and 256 are both 'a'",
        ),
        (
            {"tokens": ["?!", *BYTES[1:], "ab", "<e>", "<t>", "<p>"], "merges": []},
            "1 single bytes are no token, first 0x00",
        ),
    ],
)
def test_bad_vocabularies_are_refused(changes, words):
    with pytest.raises(FileFormatError, match=words):
        read_vocabulary(metadata(**changes), 260)


def test_end_tokens_are_the_three_of_a_turn():
    full = metadata(eos_token_id=257, eot_token_id=258, eom_token_id=257)
    assert eos_token_ids(full, 260) == [257, 258]
    assert pad_token_id(full, 260) == 257
    with pytest.raises(FileFormatError, match="names no end token"):
        eos_token_ids(metadata(eos_token_id=None), 260)
    with pytest.raises(FileFormatError, match=r"eos_token_id must lie in 0\.\.259"):
        eos_token_ids(metadata(eos_token_id=260), 260)


def test_generation_config_carries_the_recommended_sampling():
    sampling = {"general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 40, "general.sampling.min_p": 0.0}
    assert build_generation_config(metadata() | sampling, 260) == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 40,
        "eos_token_id": [257],
        "pad_token_id": 257,
    }
    assert "do_sample" not in build_generation_config(metadata() | {"general.sampling.top_k": 0}, 260)
    greedy = build_generation_config(metadata() | {"general.sampling.temp": 0.0, "general.sampling.top_p": 0.9}, 260)
    assert (greedy["do_sample"], greedy["temperature"]) == (False, 0.0)


def template(text):
    return read_chat_template({"tokenizer.chat_template": text})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% if x %}", "line 1"),
        ("line\n{{ x", "does not compile, line 2"),
        ("{% frobnicate %}", "frobnicate"),
        ("x" * (LARGEST_TEMPLATE + 1), "more than the"),
        ("{{" + "(" * 20000 + ")" * 20000 + "}}", "nests too deeply"),
        ("{% for a in b %}" * 60 + "{% endfor %}" * 60, "nests too deeply"),
        ("{% if a %}" * 150 + "{% endif %}" * 150, "nests too deeply"),
    ],
    ids=["open block", "open tag", "unknown tag", "huge", "parentheses", "loops", "conditions"],
)
def test_templates_that_cannot_run_are_refused(text, words):
    with pytest.raises(FileFormatError, match=words):
        template(text)


def test_templates_with_transformers_extensions_compile():
    turn = "{% if m.skip %}{% continue %}{% endif %}{% generation %}{{ m.c }}{% endgeneration %}"
    text = "{% for m in messages %}" + turn + "{% endfor %}"
    assert template(text) == text
    assert template_environment().from_string(text).render(messages=[{"c": "a"}, {"skip": 1}, {"c": "b"}]) == "ab"


def test_no_template_is_none():
    assert read_chat_template({}) is None
    assert template("") is None


def test_compiling_does_not_run_the_template():
    assert template("{{ 1 / 0 }}{{ raise_exception('x') }}") is not None


@pytest.mark.parametrize(
    "expression",
    ["9**(9**9)", "'a' * 800000000", "'a'|center(800000000)", "('a' * 800000000)|length", "['a'] * 99999999"],
)
@pytest.mark.parametrize("form", ["{{ %s }}", "{%% set x = %s %%}", "{%% if %s %%}x{%% endif %%}", "{{ f(%s) }}"])
def test_compiling_a_template_evaluates_nothing(form: str, expression: str) -> None:
    import resource

    from glm5deploy.glm_dsa.chat_template import compile_template

    before = resource.getrusage(resource.RUSAGE_SELF)
    compile_template(form % expression)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1.0
    assert after.ru_maxrss - before.ru_maxrss < 64 << 10  # KiB
