"""The complete map, both published layouts, every variant, and errors that name every tensor."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from glm5deploy.errors import FileFormatError, UsageError
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.name_ranges import collapse
from glm5deploy.glm_dsa.tensor_names import place, plan_tensors
from tests.support.glm_catalogue import GLM_5_2_FULL, real_metadata, real_tensors

L = "model.layers."


def setup(tensors, version="5.2"):
    names = {tensor.name for tensor in tensors}
    hparams = read_hparams(real_metadata(version), names)
    return hparams, resolve_schedule(hparams, names)


def plan(tensors, *, use_mtp=False):
    hparams, schedule = setup(real_tensors())
    return plan_tensors(tensors, hparams, schedule, use_mtp=use_mtp)


def without(*names):
    return [tensor for tensor in real_tensors() if tensor.name not in names]


def renamed(tensor, name, shape):
    return replace(tensor, name=name, shape=shape)


GOLDEN = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_norm.weight": L + "0.input_layernorm.weight",
    "blk.0.ffn_norm.weight": L + "0.post_attention_layernorm.weight",
    "blk.0.attn_q_a.weight": L + "0.self_attn.q_a_proj.weight",
    "blk.0.attn_q_a_norm.weight": L + "0.self_attn.q_a_layernorm.weight",
    "blk.0.attn_q_b.weight": L + "0.self_attn.q_b_proj.weight",
    "blk.0.attn_kv_a_mqa.weight": L + "0.self_attn.kv_a_proj_with_mqa.weight",
    "blk.0.attn_kv_a_norm.weight": L + "0.self_attn.kv_a_layernorm.weight",
    "blk.0.attn_k_b.weight": L + "0.self_attn.kv_b_proj.weight",
    "blk.0.attn_v_b.weight": L + "0.self_attn.kv_b_proj.weight",
    "blk.0.attn_output.weight": L + "0.self_attn.o_proj.weight",
    "blk.0.indexer.attn_q_b.weight": L + "0.self_attn.indexer.wq_b.weight",
    "blk.0.indexer.attn_k.weight": L + "0.self_attn.indexer.wk.weight",
    "blk.0.indexer.k_norm.weight": L + "0.self_attn.indexer.k_norm.weight",
    "blk.0.indexer.k_norm.bias": L + "0.self_attn.indexer.k_norm.bias",
    "blk.0.indexer.proj.weight": L + "0.self_attn.indexer.weights_proj.weight",
    "blk.0.ffn_gate.weight": L + "0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": L + "0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": L + "0.mlp.down_proj.weight",
    "blk.3.ffn_gate_inp.weight": L + "3.mlp.gate.weight",
    "blk.3.exp_probs_b.bias": L + "3.mlp.gate.e_score_correction_bias",
    "blk.3.ffn_gate_exps.weight": L + "3.mlp.experts.{expert}.gate_proj.weight",
    "blk.3.ffn_up_exps.weight": L + "3.mlp.experts.{expert}.up_proj.weight",
    "blk.3.ffn_down_exps.weight": L + "3.mlp.experts.{expert}.down_proj.weight",
    "blk.3.ffn_gate_shexp.weight": L + "3.mlp.shared_experts.gate_proj.weight",
    "blk.3.ffn_up_shexp.weight": L + "3.mlp.shared_experts.up_proj.weight",
    "blk.3.ffn_down_shexp.weight": L + "3.mlp.shared_experts.down_proj.weight",
    "blk.78.nextn.eh_proj.weight": L + "78.eh_proj.weight",
    "blk.78.nextn.enorm.weight": L + "78.enorm.weight",
    "blk.78.nextn.hnorm.weight": L + "78.hnorm.weight",
    "blk.78.nextn.shared_head_norm.weight": L + "78.shared_head.norm.weight",
}


def golden(name):
    """The HF name of any of the 1,809, from the written-out table with the block number exchanged."""
    block = re.match(r"blk\.(\d+)\.", name)
    if block is None:
        return GOLDEN[name]
    for written in (0, 3, 78):
        found = GOLDEN.get(name.replace(block[0], f"blk.{written}.", 1))
        if found:
            return found.replace(f"{L}{written}.", f"{L}{block[1]}.")
    raise KeyError(name)


@pytest.mark.parametrize(("layout", "count"), [("all", 1809), ("full", 1524)])
def test_golden_map_of_every_name(layout, count):
    tensors = real_tensors(layout)
    assert len(tensors) == len({tensor.name for tensor in tensors}) == count
    hparams, schedule = setup(tensors)
    result = plan_tensors(tensors, hparams, schedule, use_mtp=True)
    assert {p.name: p.hf_name for p in result.used} == {
        t.name: golden(t.name) for t in tensors if t.name not in {d.name for d in result.dropped}
    }
    assert {p.name: p.shape for p in result.used}.items() <= {t.name: t.shape for t in tensors}.items()
    assert [p.name for p in result.used] == [t.name for t in tensors if t.name in {p.name for p in result.used}]
    assert len(result.used) == 1524
    shared = [layer for layer in range(78) if layer not in GLM_5_2_FULL]
    assert len(result.dropped) == (len(shared) * 5 if layout == "all" else 0)
    assert all(".indexer." in d.name for d in result.dropped)
    assert not result.tied_embeddings


def test_both_layouts_give_the_same_parameters():
    plans = []
    for layout in ("all", "full"):
        tensors = real_tensors(layout)
        hparams, schedule = setup(tensors)
        plans.append(plan_tensors(tensors, hparams, schedule, use_mtp=False))
    assert plans[0].used == plans[1].used
    assert len(plans[0].used) == 1524 - 27
    assert {d.reason for d in plans[1].dropped} == {"the MTP block is not in use"}
    assert len(plans[1].dropped) == 27


def test_glm_5_uses_an_indexer_on_every_layer():
    tensors = real_tensors()
    hparams, schedule = setup(tensors, "5")
    assert len(plan_tensors(tensors, hparams, schedule, use_mtp=True).used) == 1809


def test_names_agree_with_gguf_py():
    """gguf-py's own architecture table knows every name (it has none for the pieces llama.cpp's converter makes)."""
    import gguf

    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GLM_DSA]}
    stems = {re.sub(r"blk\.\d+\.", "blk.{bid}.", t.name).rsplit(".", 1)[0] for t in real_tensors()}
    assert stems <= known
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, 79)
    checked = 0
    for name, hf_name in GOLDEN.items():
        suggested = table.get_name(hf_name.removesuffix(".weight").removesuffix(".bias"))
        if suggested is not None:
            checked += 1
            assert name.rsplit(".", 1)[0] == suggested or "kv_b_proj" in hf_name
    assert checked >= 20


def test_experts_unfold_into_one_name_each():
    hparams, _ = setup(real_tensors())
    placement = place("blk.5.ffn_down_exps.weight", hparams)
    assert placement.expert_name(255) == "model.layers.5.mlp.experts.255.down_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        "blk.79.attn_norm.weight",
        "blk.05.attn_norm.weight",
        "blk.-1.attn_norm.weight",
        "blk.٣.attn_norm.weight",
        "blk.0.attn_norm",
        "blk.0.attn_norm.bias",
        "attn_norm.weight",
        "",
        "blk.0.",
    ],
)
def test_unknown_names_are_not_placed(name):
    hparams, _ = setup(real_tensors())
    assert place(name, hparams) is None


def test_every_missing_tensor_is_named():
    with pytest.raises(FileFormatError) as caught:
        plan(without("output_norm.weight", "blk.4.ffn_gate_inp.weight", "blk.5.ffn_gate_inp.weight"))
    assert "3 missing: output_norm.weight, blk.{4-5}.ffn_gate_inp.weight" in caught.value.message


@pytest.mark.parametrize("tensor", real_tensors("full")[::61], ids=lambda t: t.name)
def test_any_tensor_is_missed(tensor):
    kept = [t for t in real_tensors("full") if t.name != tensor.name]
    hparams, schedule = setup(real_tensors("full"))
    if tensor.name == "output.weight":
        assert plan_tensors(kept, hparams, schedule, use_mtp=True).tied_embeddings
        return
    with pytest.raises(FileFormatError, match=re.escape(tensor.name)):
        plan_tensors(kept, hparams, schedule, use_mtp=True)


def test_every_unknown_tensor_is_named():
    extra = [renamed(real_tensors()[0], name, (6144,)) for name in ("rope_freqs.weight", "blk.7.attn_rot.weight")]
    with pytest.raises(FileFormatError, match=r"2 unknown to this architecture: rope_freqs.weight, blk\.7\.attn_rot"):
        plan([*real_tensors(), *extra])


def test_control_characters_in_names_do_not_reach_the_terminal():
    evil = renamed(real_tensors()[0], "x\x1b[2J\nweight", (6144,))
    with pytest.raises(FileFormatError) as caught:
        plan([*real_tensors(), evil])
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("name", "why"),
    [("blk.0.ffn_gate_inp.weight", "router in a dense layer"), ("blk.9.ffn_gate.weight", "dense MLP in an MoE layer")],
)
def test_kinds_belong_to_their_layers(name, why):
    hparams, _ = setup(real_tensors())
    with pytest.raises(FileFormatError, match=f"unknown to this architecture: {name}"):
        plan([*real_tensors(), renamed(real_tensors()[0], name, place(name, hparams).shape)])


def test_every_wrong_shape_is_named():
    tensors = [replace(t, shape=(2048, 8192)) if t.name == "blk.2.attn_q_b.weight" else t for t in real_tensors()]
    with pytest.raises(
        FileFormatError, match=r"blk.2.attn_q_b.weight has shape \[2048, 8192\], expected \[2048, 16384\]"
    ):
        plan(tensors)


def test_trailing_ones_are_no_difference():
    tensors = [replace(t, shape=(*t.shape, 1)) if len(t.shape) == 1 else t for t in real_tensors()]
    assert len(plan(tensors).used) == 1497


def test_whole_kv_b_serves_alone_and_yields_to_its_halves():
    sample = real_tensors()[0]
    whole = renamed(sample, "blk.8.attn_kv_b.weight", (512, 28672))
    alone = plan([*without("blk.8.attn_k_b.weight", "blk.8.attn_v_b.weight"), whole])
    placed = {p.name: p for p in alone.used}["blk.8.attn_kv_b.weight"]
    assert (placed.hf_name, placed.kind.transform) == (L + "8.self_attn.kv_b_proj.weight", "rename")
    both = plan([*real_tensors(), whole])
    assert {d.name: d.reason for d in both.dropped}["blk.8.attn_kv_b.weight"] == "its parts are used"
    half = plan([*without("blk.8.attn_v_b.weight"), whole])
    assert "blk.8.attn_k_b.weight" in {d.name for d in half.dropped}
    with pytest.raises(FileFormatError, match=r"missing: blk\.8\.attn_k_b\.weight and blk\.8\.attn_v_b\.weight"):
        plan(without("blk.8.attn_v_b.weight"))


def test_flat_halves_are_recognised():
    flat = {"blk.8.attn_k_b.weight": (192, 512 * 64), "blk.8.attn_v_b.weight": (512, 256 * 64)}
    used = plan([replace(t, shape=flat.get(t.name, t.shape)) for t in real_tensors()]).used
    assert {p.name: p.shape for p in used}["blk.8.attn_k_b.weight"] == (192, 512, 64)


def test_fused_expert_gate_and_up():
    parts = ("blk.8.ffn_gate_exps.weight", "blk.8.ffn_up_exps.weight")
    fused = renamed(real_tensors()[0], "blk.8.ffn_gate_up_exps.weight", (6144, 4096, 256))
    placed = {p.name: p for p in plan([*without(*parts), fused]).used}[fused.name]
    assert placed.kind.transform == "gate_up_experts"
    assert fused.name in {d.name for d in plan([*real_tensors(), fused]).dropped}


def test_optional_mtp_tensors_are_kept_with_mtp_only():
    extra = [
        renamed(real_tensors()[0], f"blk.78.nextn.{stem}.weight", (6144, 154880))
        for stem in ("embed_tokens", "shared_head_head")
    ]
    names = {p.name: p.hf_name for p in plan([*real_tensors(), *extra], use_mtp=True).used}
    assert names["blk.78.nextn.shared_head_head.weight"] == L + "78.shared_head.head.weight"
    assert names["blk.78.nextn.embed_tokens.weight"] == L + "78.embed_tokens.weight"
    assert not {extra[0].name, extra[1].name} & {p.name for p in plan([*real_tensors(), *extra]).used}


def test_mtp_needs_an_mtp_block():
    tensors = [t for t in real_tensors() if not t.name.startswith("blk.78.")]
    hparams, schedule = setup(tensors)
    with pytest.raises(UsageError, match="no MTP block"):
        plan_tensors(tensors, hparams, schedule, use_mtp=True)


def test_nvfp4_scales_are_refused_by_name():
    scale = renamed(real_tensors()[0], "blk.3.ffn_down_exps.scale", (256,))
    with pytest.raises(FileFormatError, match=r"ffn_down_exps\.scale") as caught:
        plan([*real_tensors(), scale])
    assert "NVFP4" in caught.value.hint


def test_collapse_names_all_in_few_words():
    names = [f"blk.{i}.a.weight" for i in (3, 4, 5, 9)] + ["output.weight", "blk.1.b.bias"]
    assert collapse(names) == "blk.{3-5,9}.a.weight, output.weight, blk.1.b.bias"
