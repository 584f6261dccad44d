"""Hyper-parameters: read from real keys, checked, and refused with the key's name."""

from __future__ import annotations

import pytest

from glm5deploy.errors import FileFormatError
from glm5deploy.gguf_files.header import read_header
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.metadata import shortest_float32
from tests.support.data import tiny_glm5
from tests.support.glm_catalogue import real_metadata, real_tensors

NAMES = frozenset(tensor.name for tensor in real_tensors())
WITHOUT_MTP = frozenset(name for name in NAMES if not name.startswith("blk.78."))


def test_glm_5_2_reads_as_its_published_config():
    h = read_hparams(real_metadata("5.2"), NAMES)
    assert (h.num_layers, h.num_nextn, h.num_blocks, h.num_dense_layers) == (78, 1, 79, 3)
    assert (h.hidden_size, h.dense_intermediate_size, h.moe_intermediate_size) == (6144, 12288, 2048)
    assert (h.num_heads, h.q_lora_rank, h.kv_lora_rank) == (64, 2048, 512)
    assert (h.qk_nope_head_dim, h.qk_rope_head_dim, h.qk_head_dim, h.v_head_dim, h.latent_dim) == (
        192,
        64,
        256,
        256,
        576,
    )
    assert (h.index_num_heads, h.index_head_dim, h.index_topk, h.indexer_types) == (32, 128, 2048, None)
    assert (h.num_experts, h.num_experts_used, h.num_shared_experts) == (256, 8, 1)
    assert (h.scoring_func, h.normalise_expert_weights, h.routed_scaling_factor) == ("sigmoid", True, 2.5)
    assert (h.rope_theta, h.rms_norm_eps, h.context_length, h.vocab_size) == (8e6, 1e-5, 1048576, 154880)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("GLM-tiny-A-GGUF/UD-Q4_K_XL/GLM-tiny-A-UD-Q4_K_XL-00001-of-00004.gguf", None),
        ("GLM-tiny-B-GGUF/GLM-tiny-B-Q8_0.gguf", (True, False, True, False)),
    ],
)
def test_real_headers_are_read(file, expected):
    header = read_header(tiny_glm5() / file)
    names = {t.name for t in header.tensors} or {"blk.0.attn_norm.weight", "blk.4.nextn.eh_proj.weight"}
    h = read_hparams(header.metadata, names)
    assert (h.num_layers, h.num_nextn, h.num_dense_layers, h.index_topk, h.num_experts) == (4, 1, 2, 64, 16)
    assert h.indexer_types == expected


@pytest.mark.parametrize(
    ("changes", "names", "layers", "nextn"),
    [
        ({}, NAMES, 78, 1),
        ({"block_count": 78, "nextn_predict_layers": None}, WITHOUT_MTP, 78, 0),
        ({}, WITHOUT_MTP, 78, 0),  # stripped after conversion: the key stays
    ],
    ids=["with MTP", "converted without", "stripped"],
)
def test_mtp_variants(changes, names, layers, nextn):
    h = read_hparams(real_metadata(**changes), names)
    assert (h.num_layers, h.num_nextn) == (layers, nextn)


def test_draft_only_file_is_refused():
    draft = {name for name in NAMES if name.startswith("blk.78.") or not name.startswith("blk.")}
    with pytest.raises(FileFormatError, match="draft-only"):
        read_hparams(real_metadata(), draft)


@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "glm4moe"])
def test_other_architectures_are_refused(architecture):
    with pytest.raises(FileFormatError, match=f"'{architecture}'.*'glm-dsa'"):
        read_hparams(real_metadata(general__architecture=architecture), NAMES)


def test_glm_5_3_flash_is_told_apart():
    with pytest.raises(FileFormatError, match="Flash, another architecture"):
        read_hparams(real_metadata(general__architecture="glm5-next"), NAMES)


def test_adapter_file_is_refused():
    with pytest.raises(FileFormatError, match=r"general\.type is 'adapter'"):
        read_hparams(real_metadata(general__type="adapter"), NAMES)


def test_later_shard_is_told_apart_from_a_broken_file():
    with pytest.raises(FileFormatError, match="split keys only"):
        read_hparams({"split.no": 1, "split.count": 3, "split.tensors.count": 1809}, NAMES)
    with pytest.raises(FileFormatError, match=r"general\.architecture is missing"):
        read_hparams({}, NAMES)


OPTIONAL = {
    "general.type",
    "glm-dsa.attention.head_count_kv",
    "glm-dsa.expert_group_count",
    "glm-dsa.expert_group_used_count",
    "glm-dsa.expert_gating_func",
    "glm-dsa.attention.key_length",
    "glm-dsa.attention.value_length",
    "glm-dsa.expert_weights_scale",
    "glm-dsa.expert_weights_norm",
    "glm-dsa.nextn_predict_layers",
}


@pytest.mark.parametrize("key", sorted(set(real_metadata()) - OPTIONAL))
def test_every_required_key_is_named_when_missing(key):
    metadata = real_metadata()
    del metadata[key]
    with pytest.raises(FileFormatError, match=f"metadata key {key} is missing"):
        read_hparams(metadata, NAMES)


def test_absent_optional_keys_have_llama_cpps_defaults():
    metadata = {key: value for key, value in real_metadata().items() if key not in OPTIONAL}
    h = read_hparams(metadata | {"glm-dsa.nextn_predict_layers": 1}, NAMES)
    assert (h.scoring_func, h.normalise_expert_weights, h.routed_scaling_factor) == ("sigmoid", False, 1.0)
    assert (h.num_expert_groups, h.num_expert_groups_used) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_count": "79"}, r"glm-dsa\.block_count must be an integer"),
        ({"block_count": True}, r"glm-dsa\.block_count must be an integer"),
        ({"block_count": 10**9}, r"block_count must lie in 1\.\.4096"),
        ({"nextn_predict_layers": 79}, "leaves no hidden layer"),
        ({"attention__head_count": [64] * 79}, "head_count must be an integer, the file holds an array of 79 values"),
        ({"embedding_length": 0}, r"embedding_length must lie in 1\.\."),
        ({"rope__freq_base": float("nan")}, "freq_base must be a positive finite number"),
        ({"rope__freq_base": 0.0}, "freq_base must be a positive finite number"),
        ({"expert_weights_norm": 1}, "expert_weights_norm must be a boolean"),
        ({"expert_gating_func": 7}, "expert_gating_func is 7"),
        ({"rope__dimension_count": 256}, "key_length_mla must exceed"),
        ({"attention__key_length": 512}, r"attention\.key_length must be"),
        ({"attention__value_length": 256}, r"attention\.value_length must be"),
        ({"rope__scaling__type": "yarn"}, "no RoPE scaling"),
        ({"rope__dimension_sections": [16, 24, 24]}, "one RoPE section"),
        ({"expert_used_count": 300}, "expert_used_count must not exceed"),
        ({"leading_dense_block_count": 79}, r"leading_dense_block_count must lie in 0\.\.78"),
        ({"attention__indexer__types": [True] * 79}, "79 entries for 78"),
        ({"attention__indexer__types": ["full"] * 78}, "array of booleans"),
        ({"attention__indexer__types": [2] * 78}, "array of booleans"),
        ({"expert_feed_forward_length": [0, 0, 0, 2048, 1024]}, "different widths"),
    ],
)
def test_bad_values_are_named(changes, words):
    with pytest.raises(FileFormatError, match=words):
        read_hparams(real_metadata(**changes), NAMES)


def test_width_per_block_is_accepted_when_it_is_one_width():
    h = read_hparams(real_metadata(expert_feed_forward_length=[0] * 3 + [2048] * 76), NAMES)
    assert h.moe_intermediate_size == 2048


def test_indexer_types_may_be_integers():
    flags = [1, 1, 1] + [0] * 75
    assert read_hparams(real_metadata(attention__indexer__types=flags), NAMES).indexer_types == tuple(map(bool, flags))


@pytest.mark.parametrize(
    ("stored", "shortest"),
    [(9.999999747378752e-06, 1e-5), (8e6, 8e6), (2.5, 2.5), (0.10000000149011612, 0.1), (1 / 3, 0.33333333)],
)
def test_floats_come_back_as_the_shortest_decimal(stored, shortest):
    assert shortest_float32(stored) == shortest
