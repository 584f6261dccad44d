"""The demonstration's model: a sound split set whose weights, tokenizer and template do what real clients need."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from glm5deploy.demo.random_blocks import K_QUANTS, random_k_quants
from glm5deploy.demo.tiny_model import write_tiny_model
from glm5deploy.demo.tiny_tokenizer import train
from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.tensor_parallel import require_legal_tensor_parallel
from tests.support.folders import folder_of, write_folder_of


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def tokenizer(shards, tmp_path_factory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_folder_of(shards[0], tmp_path_factory.mktemp("model")))


def test_set_is_complete_and_looks_like_a_published_one(shards):
    found = ShardSet.open(shards[-1])
    assert found.paths == shards
    assert len(shards) >= 3
    assert not found.headers[0].tensors
    assert 10e6 < found.file_bytes < 25e6
    types = {tensor.type.name for tensor in found.tensors}
    assert types >= {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_1", "F16", "BF16", "F32"}


def test_model_has_every_tensor_and_its_own_schedule(shards):
    folder = folder_of(shards[0])
    h = folder.hparams
    assert (folder.schedule.pattern, folder.schedule.source, folder.warnings) == ("FSFS", "file", ())
    assert folder.plan.dropped == ()
    assert (h.qk_nope_head_dim, h.qk_rope_head_dim, h.v_head_dim, h.kv_lora_rank, h.index_topk) == (
        192,
        64,
        256,
        512,
        64,
    )
    require_legal_tensor_parallel(ShardSet.open(shards[0]).tensors, h, 2)


def test_bytes_are_the_same_every_time(shards, tmp_path):
    again = write_tiny_model(tmp_path)
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in shards]


def test_weights_have_the_size_they_are_meant_to_have(shards):
    """Read by gguf-py, which shares no code with our block layouts."""
    import gguf

    checked = set()
    for path in shards:
        for tensor in gguf.GGUFReader(path).tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
            assert np.isfinite(values).all()
            if values.ndim == 1 or tensor.name == "output.weight":
                continue
            inputs = tensor.shape[1] if "attn_k_b" in tensor.name else tensor.shape[0]
            assert values.std() == pytest.approx(float(inputs) ** -0.5, rel=0.1), tensor.name
            assert abs(values.mean()) < 0.05 * values.std(), tensor.name
            checked.add(tensor.tensor_type.name)
    assert checked >= {"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_1", "F16", "BF16"}


@pytest.mark.parametrize("kind", K_QUANTS)
def test_groups_of_a_block_differ(kind):
    """Equal scales everywhere would let a kernel that reads the wrong group's scale pass."""
    import gguf

    data = random_k_quants(np.random.default_rng(0), (64, 256), kind, 1.0)
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    groups = values.reshape(64, -1, 16 if kind == "Q6_K" else 32)
    spread = np.abs(groups).max(axis=-1)
    assert (spread.max(axis=1) / spread.min(axis=1)).min() > 1.2
    assert values.std() == pytest.approx(1.0, rel=0.05)


def test_only_words_can_be_answered(shards):
    import gguf

    output = next(t for path in shards for t in gguf.GGUFReader(path).tensors if t.name == "output.weight")
    values = gguf.quants.dequantize(output.data, output.tensor_type)
    tokens = train()
    words = {tokens.tokens[i] for i in np.flatnonzero(np.abs(values).max(axis=1))}
    assert words == tokens.words
    assert len(words) > 250


def test_writing_needs_no_torch(tmp_path):
    code = (
        "import sys; from pathlib import Path; from glm5deploy.demo.tiny_model import write_tiny_model; "
        "assert not {'gguf', 'numpy'} & set(sys.modules); write_tiny_model(Path(sys.argv[1])); "
        "assert not {'torch', 'transformers', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


@pytest.mark.parametrize("text", ["the quiet river under a bridge", "Grüße, 世界! 🚀 12345\n\tx", ""])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_and_markers_are_single_tokens(tokenizer):
    assert len(tokenizer.encode(" river")) == 1
    for marker in ("<|user|>", "<think>", "</think>", "<tool_call>", "<arg_key>", "</arg_value>", "<tool_response>"):
        assert len(tokenizer.encode(marker)) == 1
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_template_of_a_plain_chat(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "reasoning_content": "greeting"},
        {"role": "user", "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": " on"}]},
    ]
    before = "[gMASK]<sop><|system|>Be brief.<|user|>Hi<|assistant|><think>greeting</think>Yes?<|user|>Go on"
    assert render(tokenizer, messages) == before + "<|assistant|><think>"
    assert render(tokenizer, messages, enable_thinking=True) == before + "<|assistant|><think>"
    assert render(tokenizer, messages, enable_thinking=False) == before + "<|assistant|></think>"


def test_template_of_tool_calls(tokenizer):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    arguments = {"city": "Ulm", "days": 2}
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}],
        },
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain"},
    ]
    text = render(tokenizer, messages, tools=[tool])
    head, _, tail = text.partition("<|user|>")
    assert head.startswith("[gMASK]<sop><|system|>\n# Tools\n")
    assert '\n<tools>\n{"name": "weather", "parameters": {"type": "object"}}\n</tools>\n' in head
    assert tail == (
        "Weather?<|assistant|></think><tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|><tool_response>sun</tool_response><tool_response>rain</tool_response><|assistant|><think>"
    )
