"""Planning figures against those published for the real model."""

from __future__ import annotations

from math import prod

import pytest

from glm5deploy.gguf_files.shards import ShardSet
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.memory import ParallelLayout, cache_bytes_per_token, sizes_by_role, weight_bytes_per_rank
from glm5deploy.glm_dsa.tensor_names import plan_tensors
from tests.support.data import SET_A
from tests.support.glm_catalogue import real_metadata, real_tensors


class Model:
    def __init__(self, version="5.2", types=None, layout="all", use_mtp=False):
        self.tensors = real_tensors(layout, types=types)
        names = {t.name for t in self.tensors}
        self.hparams = read_hparams(real_metadata(version), names)
        self.schedule = resolve_schedule(self.hparams, names)
        self.plan = plan_tensors(self.tensors, self.hparams, self.schedule, use_mtp=use_mtp)
        self.by_name = {t.name: t for t in self.tensors}

    def per_rank(self, *stems, dense=False, **layout):
        used = [p for p in self.plan.used if not stems or p.kind.gguf in stems]
        return weight_bytes_per_rank(used, self.by_name, self.hparams, ParallelLayout(**layout), dense=dense)


def test_parameters_are_the_published_count():
    weights = sum(prod(t.shape) for t in real_tensors("full"))
    assert weights == pytest.approx(753.3e9, rel=2e-3)  # 753.9 B with every block's indexer and MTP
    assert sum(prod(t.shape) for t in real_tensors("all")) == pytest.approx(753.9e9, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "dtype", "published"),
    [
        ("5.2", "bfloat16", 92_628),
        ("5", "bfloat16", 100_152),
        ("5.2", "fp8_ds_mla", 53_940),
        ("5", "fp8_ds_mla", 61_464),
    ],
)
def test_cache_bytes_per_token(version, dtype, published):
    model = Model(version)
    assert cache_bytes_per_token(model.hparams, model.schedule, dtype) == published


def test_mtp_adds_a_full_layer_to_the_cache():
    model = Model()
    without = cache_bytes_per_token(model.hparams, model.schedule)
    assert cache_bytes_per_token(model.hparams, model.schedule, use_mtp=True) - without == 1152 + 132


def test_expert_stacks():
    """6144 x 2048 x 256 in Q4_K: 1.81 GB a stack, 0.23 GB a rank at TP 8, and as much with expert parallelism."""
    model = Model()
    stack = model.by_name["blk.3.ffn_gate_exps.weight"].nbytes
    assert stack == pytest.approx(1.81e9, rel=2e-3)
    assert model.per_rank("ffn_gate_exps.weight", tp=8) == (75 * stack // 8,)
    assert model.per_rank("ffn_gate_exps.weight", tp=8, expert_parallel=True) == (75 * stack // 8,)
    # 256 experts over 6 ranks: the fullest has 43.
    assert model.per_rank("ffn_gate_exps.weight", tp=6, expert_parallel=True) == (75 * (stack // 256) * 43,)


def test_kv_b_is_dense_whatever_the_file_holds():
    model = Model(use_mtp=True)
    (one,) = model.per_rank("attn_k_b.weight", "attn_v_b.weight")
    assert one == 79 * 28672 * 512 * 2
    assert one == pytest.approx(2.32e9, rel=1e-3)
    assert model.per_rank("attn_k_b.weight", "attn_v_b.weight", tp=8) == (one // 8,)


def test_dense_layers_of_the_plugin():
    model = Model(use_mtp=True)
    assert model.per_rank("nextn.eh_proj.weight", tp=8) == (12288 * 6144 * 2,)  # 151 MB, not divided
    assert model.per_rank("indexer.attn_q_b.weight", dense=True) == (22 * 4096 * 2048 * 2,)  # 16.8 MB a full layer
    assert model.per_rank("exp_probs_b.bias") == (76 * 256 * 4,)


def test_whole_model_on_eight_gpus():
    """Eight ranks hold the file's bytes, plus what is not divided and what must be dense."""
    model = Model()
    (rank,) = model.per_rank(tp=8)
    file = sum(t.nbytes for t in model.tensors)
    assert file / 8 < rank + 1e9
    assert rank == pytest.approx(file / 8, rel=0.08)


def test_pipeline_stages_share_layers_like_vllm():
    model = Model()
    whole = model.per_rank()[0]
    stages = model.per_rank(pp=4)
    assert sum(stages) == pytest.approx(whole + model.by_name["token_embd.weight"].nbytes, abs=8)
    # 78 layers: 19, 20, 20, 19.
    experts = model.per_rank("ffn_up_exps.weight", pp=4)
    assert [round(size / model.by_name["blk.3.ffn_up_exps.weight"].nbytes) for size in experts] == [16, 20, 20, 19]
    assert model.per_rank(pp=1) == (whole,)


def test_roles_of_a_real_file_add_up():
    shards = ShardSet.open(SET_A / "GLM-tiny-A-GGUF/UD-Q4_K_XL")
    sizes = sizes_by_role(shards.tensors, read_hparams(shards.metadata, shards.by_name))
    assert sum(size.nbytes for size in sizes) == sum(t.nbytes for t in shards.tensors)
    assert sum(size.tensors for size in sizes) == 112
    assert [size.nbytes for size in sizes] == sorted((size.nbytes for size in sizes), reverse=True)
    experts = next(size for size in sizes if size.role == "experts")
    assert experts.types == {"Q4_K": 6, "Q5_K": 2, "Q6_K": 1}
    assert 4.5 < experts.bits_per_weight < 5.5
    assert {size.role for size in sizes} >= {"attention", "indexer", "embeddings", "norms", "shared experts", "router"}
