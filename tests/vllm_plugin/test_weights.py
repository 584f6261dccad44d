"""The weight stream on real files: complete names, equal layouts, kv_b, ranks' parts, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

from glm5deploy.errors import DeployError, FileFormatError
from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME
from glm5deploy.gguf_files.shards import ShardTensor
from glm5deploy.vllm_plugin.loader import require_complete
from glm5deploy.vllm_plugin.model_files import ModelFiles, require_dequantisable
from glm5deploy.vllm_plugin.weights import Rank, stream
from tests.support.goldens import SETS
from tests.vllm_plugin.conftest import Layout, Run

Folder = Callable[[Run], Path]


def load(folder: Path, dtype: torch.dtype = torch.float32, rank: Rank | None = None) -> dict[str, torch.Tensor]:
    files = ModelFiles.open(folder)
    plan = files.plan(files.pattern)
    pairs = list(stream(plan.used, files.shards.by_name, dtype, rank or Rank()))
    assert len({name for name, _ in pairs}) == len(pairs), "a name came twice"
    return dict(pairs)


def expected_names(schedule: str, dense: int = 2, experts: int = 16) -> set[str]:
    """Hugging Face names of the tiny models, spelled out independently of the mapping table."""
    names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer, letter in enumerate(schedule):
        block = [f"{norm}_layernorm.weight" for norm in ("input", "post_attention")]
        block += [f"self_attn.{p}_proj.weight" for p in ("q_a", "q_b", "kv_b", "o")]
        block += ["self_attn.kv_a_proj_with_mqa.weight"]
        block += [f"self_attn.{p}_layernorm.weight" for p in ("q_a", "kv_a")]
        if letter == "F":
            block += [f"self_attn.indexer.{p}.weight" for p in ("wq_b", "wk", "weights_proj", "k_norm")]
            block += ["self_attn.indexer.k_norm.bias"]
        if layer < dense:
            block += [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
        else:
            block += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
            block += [f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up", "down")]
            block += [f"mlp.experts.{e}.{p}_proj.weight" for e in range(experts) for p in ("gate", "up", "down")]
        names |= {f"model.layers.{layer}.{name}" for name in block}
    return names


@pytest.mark.parametrize("key", SETS)
def test_the_stream_has_every_name_of_the_model_and_no_other(key: str, model_folder: Folder) -> None:
    assert set(load(model_folder(Run(key)))) == expected_names(SETS[key].schedule)


@pytest.mark.parametrize("key", ["A", "B-Q4"])
def test_shards_and_merged_file_hold_the_same_numbers(key: str, model_folder: Folder) -> None:
    shards, merged = (load(model_folder(Run(key, layout))) for layout in layouts())
    assert list(shards) == list(merged)
    for name, tensor in shards.items():
        assert tensor.dtype == merged[name].dtype
        assert torch.equal(tensor, merged[name]), name


def layouts() -> tuple[Layout, Layout]:
    return "shards", "merged"


def test_numbers_are_those_of_the_gguf_reference_reader(model_folder: Folder) -> None:
    served = load(model_folder(Run("B-Q8")))
    stored = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(SETS["B-Q8"].path).tensors}
    gate = stored["blk.2.ffn_gate_exps.weight"]
    down = stored["blk.3.ffn_down_exps.weight"]
    for expert in (0, 7, 15):
        assert np.array_equal(served[f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"], gate[expert])
        assert np.array_equal(served[f"model.layers.3.mlp.experts.{expert}.down_proj.weight"], down[expert])
    assert np.array_equal(served["lm_head.weight"], stored["output.weight"])
    assert np.array_equal(served["model.layers.2.mlp.gate.e_score_correction_bias"], stored["blk.2.exp_probs_b.bias"])
    assert np.array_equal(
        served["model.layers.0.self_attn.indexer.weights_proj.weight"], stored["blk.0.indexer.proj.weight"]
    )


@pytest.mark.parametrize("key", SETS)
def test_kv_b_has_key_rows_then_value_rows_in_each_head(key: str, model_folder: Folder) -> None:
    folder = model_folder(Run(key))
    served = load(folder)["model.layers.1.self_attn.kv_b_proj.weight"]
    stored = {}
    for path in ModelFiles.open(folder).shards.paths:
        for tensor in GGUFReader(path).tensors:
            if tensor.name in ("blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"):
                stored[tensor.name] = dequantize(tensor.data, tensor.tensor_type)
    k_b, v_b = stored["blk.1.attn_k_b.weight"], stored["blk.1.attn_v_b.weight"]
    assert k_b.shape == (4, 512, 192)
    rows = served.view(4, 192 + 256, 512).numpy()
    for head in range(4):
        assert np.array_equal(rows[head, :192], k_b[head].T)
        assert np.array_equal(rows[head, 192:], v_b[head])


@pytest.mark.parametrize("key", SETS)
def test_ranks_read_their_part_and_nothing_of_the_others(key: str, model_folder: Folder) -> None:
    folder = model_folder(Run(key))
    whole = load(folder)
    parts = [load(folder, rank=Rank(index, 2)) for index in range(2)]
    cut = set()
    for name, tensor in whole.items():
        here = [~part[name].isnan() for part in parts]
        assert all(torch.equal(part[name][mask], tensor[mask]) for part, mask in zip(parts, here, strict=True)), name
        assert bool((here[0] | here[1]).all()), f"{name}: a part is read by nobody"
        if not bool((here[0] & here[1]).all()):
            assert not bool((here[0] & here[1]).any()), name
            cut.add(name.split("layers.")[-1].split(".", 1)[-1])
    assert {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight", "self_attn.o_proj.weight"} <= cut
    assert {"mlp.down_proj.weight", "mlp.shared_experts.gate_proj.weight"} <= cut
    assert not any("indexer" in name or "q_a_proj" in name or "norm" in name for name in cut)


def test_a_cut_inside_a_block_reads_whole_rows(model_folder: Folder) -> None:
    """Eight ranks would cut o_proj's rows of 1024 into halves of 256-wide blocks; dense weights may be cut anywhere."""
    folder = model_folder(Run("B-Q4"))
    name = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(load(folder, rank=Rank(3, 8))[name], load(folder)[name])


def test_expert_parallel_ranks_get_whole_experts(model_folder: Folder) -> None:
    part = load(model_folder(Run("A")), rank=Rank(1, 2, expert_parallel=True))
    assert not any(tensor.isnan().any() for name, tensor in part.items() if ".experts." in name)
    assert part["model.layers.2.self_attn.o_proj.weight"].isnan().any()


def test_types_of_the_stream(model_folder: Folder) -> None:
    stream_types = {name: t.dtype for name, t in load(model_folder(Run("B-Q8")), torch.bfloat16).items()}
    assert stream_types["model.layers.2.mlp.gate.weight"] == torch.float32
    assert stream_types["model.layers.2.mlp.gate.e_score_correction_bias"] == torch.float32
    assert stream_types["model.layers.0.self_attn.indexer.k_norm.bias"] == torch.float32
    assert stream_types["model.layers.2.mlp.experts.0.up_proj.weight"] == torch.bfloat16


def test_missing_and_unknown_tensors_are_named(model_folder: Folder, tmp_path: Path) -> None:
    folder = copy_with_bytes(model_folder(Run("B-Q8")), tmp_path, b"blk.1.attn_q_a.weight", b"blk.1.attn_q_z.weight")
    with pytest.raises(FileFormatError, match=r"1 missing: blk\.1\.attn_q_a\.weight.*unknown.*blk\.1\.attn_q_z") as e:
        load(folder)
    assert e.value.hint


def copy_with_bytes(folder: Path, target: Path, old: bytes, new: bytes) -> Path:
    """A model folder over a copy of the weights in which ``old`` is replaced once in the header."""
    pointer = json.loads((folder / "glm5_gguf.json").read_text())
    (source,) = pointer["files"]
    data = Path(source).read_bytes()
    assert data.count(old) == 1
    (target / "weights.gguf").write_bytes(data.replace(old, new))
    copied = Path(shutil.copytree(folder, target / "model"))
    (copied / "glm5_gguf.json").write_text(json.dumps({**pointer, "files": [str(target / "weights.gguf")]}))
    return copied


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ({"version": 2}, "version-1"),
        ({"files": ["weights.gguf"]}, "absolute paths"),
        ({"files": [], "sizes": []}, "absolute paths"),
        ({"sizes": [1]}, "has 24567744 bytes, .* made for 1"),
        ({"files": ["/nowhere/weights.gguf"]}, "does not exist"),
        ({"index_topk_pattern": "FFFF"}, "built with index_topk_pattern 'FSFS', .* says 'FFFF'"),
    ],
)
def test_a_bad_pointer_to_the_weights_is_refused(
    change: dict[str, object] | str | None, message: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model_folder(Run("B-Q8")), tmp_path / "model"))
    pointer = folder / "glm5_gguf.json"
    if change is None:
        pointer.unlink()
    elif isinstance(change, str):
        pointer.write_text(change)
    else:
        pointer.write_text(json.dumps({**json.loads(pointer.read_text()), **change}))
    with pytest.raises(FileFormatError, match=message) as e:
        ModelFiles.open(folder).plan("FSFS")
    assert "glm5deploy patch" in str(e.value.hint)


def test_a_type_without_dequantisation_is_named() -> None:
    def tensor(name: str, kind: str) -> ShardTensor:
        return ShardTensor(name, TYPES_BY_NAME[kind], (256, 1), Path("w.gguf"), 0, 256, 0)

    with pytest.raises(FileFormatError, match=r"I8: blk\.\{0-1\}\.ffn_up\.weight$"):
        require_dequantisable(
            [tensor("blk.0.ffn_up.weight", "I8"), tensor("blk.1.ffn_up.weight", "I8"), tensor("x", "IQ1_S")]
        )


def test_parameters_left_unset_or_not_numbers_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
    require_complete(model, {"0.weight", "1.weight"})
    with pytest.raises(DeployError, match=r"1 model parameters got no weights: 1\.weight$"):
        require_complete(model, {"0.weight"})
    model[0].weight.data[1, 0] = torch.nan
    with pytest.raises(DeployError, match=r"NaN or infinity after loading: 0\.weight$"):
        require_complete(model, {"0.weight", "1.weight"})
