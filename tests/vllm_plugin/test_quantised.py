"""Weights kept as the file has them: which modules hold what, and that vLLM's layers compute with them as with dense.

Products run in torch here (fp32); ``test_gpu_quantised.py`` runs the same through Triton.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import glm5deploy.vllm_plugin
from glm5deploy.errors import DeployError, FileFormatError, UsageError
from glm5deploy.quants.planes import empty_planes
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.latent_attention import why_not
from glm5deploy.vllm_plugin.loader import draft_placements, main_placements
from glm5deploy.vllm_plugin.model_files import ModelFiles
from glm5deploy.vllm_plugin.quantised_linear import Glm5LinearMethod
from glm5deploy.vllm_plugin.quantised_loading import building, fill, quantised_layers, scales_are_finite
from glm5deploy.vllm_plugin.quantised_modules import Module, fingerprint, quantised_modules
from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod
from tests.support.built_model import configuration, load, single_rank
from tests.support.goldens import SETS
from tests.vllm_plugin.conftest import Run
from tests.vllm_plugin.test_weights import copy_with_bytes

Folder = Callable[[Run], Path]
Pair = tuple[Any, nn.Module, Any, nn.Module]


def modules_of(folder: Path, *, draft: bool = False) -> dict[str, Module]:
    files = ModelFiles.open(folder)
    plan = files.plan(files.pattern, use_mtp=draft)
    layers = files.hparams.num_layers
    placements = draft_placements(plan, layers) if draft else main_placements(plan, range(layers))
    return quantised_modules(placements, files.shards.by_name)


def types(module: Module) -> list[str]:
    return [part.planes_type for part in module.parts]


def test_modules_of_a_mixed_file(model_folder: Folder) -> None:
    found = modules_of(model_folder(Run("A")))
    assert types(found["model.layers.0.self_attn.fused_qkv_a_proj"]) == ["Q5_K", "Q8_0"]
    assert types(found["model.layers.2.mlp.experts"]) == ["Q4_K", "Q4_K", "Q5_K"]
    assert types(found["model.layers.3.mlp.experts"]) == ["Q4_K", "Q4_K", "Q6_K"]
    assert types(found["lm_head"]) == ["Q6_K"]
    assert types(found["model.embed_tokens"]) == ["Q4_K"]
    assert types(found["model.layers.1.self_attn.indexer.wq_b"]) == ["Q4_K"]
    dense = ("kv_b_proj", ".wk", "weights_proj", "mlp.gate", "norm", "eh_proj")
    assert not [name for name in found if name.endswith(dense)]


def test_the_draft_model_has_the_mtp_block_and_a_head(model_folder: Folder) -> None:
    found = modules_of(model_folder(Run("A")), draft=True)
    assert {name.split(".", 3)[2] for name in found} == {"4"}
    assert {"model.layers.4.head", "model.layers.4.mlp.experts", "model.layers.4.self_attn.o_proj"} <= set(found)
    assert not any("eh_proj" in name for name in found)


def test_another_mix_of_types_has_another_fingerprint(model_folder: Folder) -> None:
    a, b = modules_of(model_folder(Run("A"))), modules_of(model_folder(Run("B-Q4")))
    assert fingerprint(a) == fingerprint(dict(reversed(a.items())))
    assert fingerprint(a) != fingerprint(b)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """Models can be built: the plugin is registered, and this process is the only rank."""
    glm5deploy.vllm_plugin.register()
    with single_rank():
        yield


@pytest.fixture(scope="module", params=sorted(SETS))
def pair(request: pytest.FixtureRequest, model_folder: Folder, alone: None) -> Pair:
    """A set's model loaded dense and quantised by the real loader, each with its configuration."""
    folder = model_folder(Run(request.param))
    return (*load(folder, "dense"), *load(folder, "quantised"))


def test_every_module_computes_what_the_dense_one_computes(pair: Pair) -> None:
    _, dense, _, quantised = pair
    layers = quantised_layers(quantised)
    full = pair[0].model_config.hf_config.index_topk_pattern.count("F")
    assert len(layers) == 24 + full
    generator = torch.Generator().manual_seed(1)
    for name, layer in layers.items():
        method: Any = layer.quant_method
        if isinstance(method, Glm5MoeMethod):
            continue
        twin: Any = dense.get_submodule(name)
        x = torch.randn(5, twin.input_size, generator=generator)
        expected = twin.quant_method.apply(twin, x)
        assert not hasattr(layer, "weight")
        torch.testing.assert_close(method.apply(layer, x), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_layers_compile_into_one_graph(pair: Pair) -> None:
    """As vLLM compiles a model on a GPU: no break at our operations, whatever the number of tokens."""
    _, _, _, quantised = pair
    layer = quantised.model.layers[1]

    def run(ids: torch.Tensor) -> torch.Tensor:
        x = quantised.model.embed_tokens(ids)
        return layer.mlp(layer.self_attn.fused_qkv_a_proj(x)[0][:, :256] + x)  # type: ignore[no-any-return]

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for count in (3, 5):
        ids = torch.arange(count)
        assert torch.equal(compiled(ids), run(ids))


def test_embeddings_are_the_dense_ones(pair: Pair) -> None:
    _, dense, _, quantised = pair
    ids = torch.tensor([[0, 7, 1023], [511, 7, 3]])
    assert torch.equal(quantised.model.embed_tokens(ids), dense.model.embed_tokens(ids))


def test_routed_experts_compute_what_the_dense_ones_compute(pair: Pair) -> None:
    """The whole block: router, routed and shared experts, vLLM's runner around them."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    dense_config, dense, quantised_config, quantised = pair
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2))
    for layer in (2, 3):
        results = []
        for config, model in ((dense_config, dense), (quantised_config, quantised)):
            with set_current_vllm_config(config), set_forward_context(None, config):
                results.append(model.model.layers[layer].mlp(x.clone()))
        expected, found = results
        assert float(expected.abs().max()) > 0
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_nothing_of_the_dense_model_is_lost(pair: Pair) -> None:
    """What has no planes is a parameter of the same value; every dense matrix without its twin has planes."""
    _, dense, _, quantised = pair
    ours = dict(quantised.named_parameters())
    held = set(quantised_layers(quantised))
    for name, parameter in dense.named_parameters():
        if name in ours:
            assert torch.equal(ours[name], parameter), name
        else:
            assert name.rpartition(".")[0] in held, name


def test_the_draft_model_keeps_its_weights_quantised_too(model_folder: Folder, alone: None) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    drafts = []
    for weights in ("dense", "quantised"):
        speculative = {"method": "mtp", "num_speculative_tokens": 2}
        config, _ = load(model_folder(Run("A")), weights, speculative_config=speculative)
        with set_current_vllm_config(config):
            drafts.append(get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config))
        assert set(config.additional_config) == ({"glm5_gguf", "glm5_gguf_draft"} if weights == "quantised" else set())
        assert config.quant_config is None
    dense, quantised = drafts
    inside = ("mtp_block.self_attn.o_proj", "mtp_block.mlp.experts.routed_experts", "shared_head.head")
    assert {f"model.layers.4.{name}" for name in inside} <= set(quantised_layers(quantised))
    ours, twin = (model.model.layers["4"] for model in (quantised, dense))
    x = torch.randn(3, 1024)
    expected = twin.mtp_block.self_attn.o_proj(x)[0]
    torch.testing.assert_close(ours.mtp_block.self_attn.o_proj(x)[0], expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(ours.eh_proj.weight, twin.eh_proj.weight)
    for layer in (ours, twin):
        assert why_not(layer.mtp_block.self_attn.mla_attn) is None, "its operations are fused like all others"


class Rank(nn.Module):
    """What a method asks of its layer: vLLM's tensor-parallel place and, of experts, which ones are here."""

    def __init__(self, rank: int, size: int, **more: Any) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.prefix = rank, size, "layer"
        for name, value in more.items():
            setattr(self, name, value)


def test_an_illegal_cut_is_refused_before_a_model_is_built(model_folder: Folder) -> None:
    glm5deploy.vllm_plugin.register()
    config = configuration(model_folder(Run("B-Q4")))
    asked = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=4, enable_expert_parallel=False),
        additional_config={},
        quant_config=None,
    )
    with pytest.raises(UsageError, match="would cut quantisation blocks") as e:
        building(asked, config.model_config)
    assert e.value.hint == "Use TP 1 with pipeline parallelism 4 on the same 4 GPUs."
    asked.parallel_config.tensor_parallel_size = 1
    with building(asked, config.model_config):
        assert "lm_head" in asked.quant_config.modules
    assert asked.quant_config is None
    assert list(asked.additional_config) == ["glm5_gguf"]
    config.model_config.dtype = torch.float16
    with pytest.raises(UsageError, match="in bfloat16, not in float16"):
        building(asked, config.model_config)


def test_a_type_of_a_fork_is_refused_by_name_before_anything_is_loaded(model_folder: Folder, tmp_path: Path) -> None:
    folder = model_folder(Run("B-Q8"))
    tensor = ModelFiles.open(folder).shards.by_name["blk.1.attn_q_a.weight"]
    old = tensor.name.encode() + struct.pack("<IQQI", 2, *tensor.shape, tensor.type.id)
    new = tensor.name.encode() + struct.pack("<IQQI", 2, *tensor.shape, 144)
    changed = copy_with_bytes(folder, tmp_path, old, new)
    with pytest.raises(FileFormatError, match=r"IQ4_KS"):
        modules_of(changed)


def test_scales_that_are_no_numbers_name_their_tensor(model_folder: Folder, tmp_path: Path) -> None:
    glm5deploy.vllm_plugin.register()
    folder = model_folder(Run("B-Q8"))
    files = ModelFiles.open(folder)
    tensor = files.shards.by_name["blk.2.ffn_up_exps.weight"]
    broken = tmp_path / "weights.gguf"
    shutil.copy(tensor.path, broken)
    with broken.open("r+b") as file:
        file.seek(tensor.offset + 34 * 1000)
        file.write(struct.pack("<e", math.nan))
    module = modules_of(folder)["model.layers.2.mlp.experts"]
    parts = tuple(dataclasses.replace(p, tensor=dataclasses.replace(p.tensor, path=broken)) for p in module.parts)
    layer = expert_layer(Module(module.prefix, parts), 16, [*range(16)])
    with pytest.raises(DeployError, match=r"1 tensors have scales .*: blk\.2\.ffn_up_exps\.weight$"):
        fill(nn.ModuleDict({"experts": layer}))


def expert_layer(module: Module, experts: int, mine: list[int], tp: tuple[int, int] = (0, 1)) -> Rank:
    """A layer of routed experts: ``mine`` are this rank's, ``tp`` its place in each of them."""
    places = {e: i for i, e in enumerate(mine)}
    layer = Rank(
        *tp,
        moe_config=SimpleNamespace(tp_rank=tp[0]),
        global_num_experts=experts,
        local_num_experts=len(mine),
        layer_name="experts",
        expert_map_manager=SimpleNamespace(map_global_to_local=lambda e: places.get(e, -1)),
        expert_map=None if len(mine) == experts else torch.tensor([places.get(e, -1) for e in range(experts)]),
    )
    method = Glm5MoeMethod(SimpleNamespace(), module)
    gate = module.parts[0]
    method.create_weights(layer, len(mine), gate.columns, gate.rows // tp[1], torch.float32)
    layer.quant_method = method
    return layer


def test_expert_parallel_ranks_add_up(model_folder: Folder) -> None:
    """Four ranks with scattered experts: each reads its own, and their results add up to one rank's."""
    module = modules_of(model_folder(Run("A")))["model.layers.3.mlp.experts"]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 256, generator=generator)
    ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(6)]).to(torch.int32)
    weights = torch.rand(6, 4, generator=generator)
    results = []
    for mine in ([*range(16)], [*range(0, 16, 4)], [*range(1, 16, 4)], [*range(2, 16, 4)], [*range(3, 16, 4)]):
        layer = expert_layer(module, 16, mine)
        fill(nn.ModuleDict({"experts": layer}))
        results.append(layer.quant_method.apply(layer, x, weights, ids, None, None))
    torch.testing.assert_close(sum(results[1:]), results[0], rtol=1e-4, atol=1e-5)
    assert not torch.equal(results[1], results[2])


@pytest.mark.parametrize("mine", [[*range(16)], [*range(3, 16, 4)]], ids=["all experts", "one rank of four"])
def test_padding_has_no_experts(mine: list[int], model_folder: Folder) -> None:
    """Expert 15, the last of both layers, must not stand in for an id of -1."""
    layer = expert_layer(modules_of(model_folder(Run("A")))["model.layers.3.mlp.experts"], 16, mine)
    fill(nn.ModuleDict({"experts": layer}))
    ids = torch.tensor([[-1, -1], [15, -1], [15, 15]], dtype=torch.int32)
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(5)).expand(3, 256)
    out = layer.quant_method.apply(layer, x, torch.ones(3, 2), ids, None, None)
    assert torch.equal(out[0], torch.zeros(256))
    assert float(out[1].abs().max()) > 0
    torch.testing.assert_close(out[2], 2 * out[1])


def test_tensor_parallel_ranks_add_up(model_folder: Folder) -> None:
    module = modules_of(model_folder(Run("B-Q8")))["model.layers.3.mlp.experts"]
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, module.parts[0].columns, generator=generator)
    ids = torch.randint(0, 16, (6, 4), generator=generator)
    weights = torch.rand(6, 4, generator=generator)
    results = []
    for tp in ((0, 1), (0, 2), (1, 2)):
        layer = expert_layer(module, 16, [*range(16)], tp)
        fill(nn.ModuleDict({"experts": layer}))
        results.append(layer.quant_method.apply(layer, x, weights, ids, None, None))
    torch.testing.assert_close(results[1] + results[2], results[0], rtol=1e-4, atol=1e-5)


def linear_layer(module: Module, rank: int, size: int) -> Rank:
    """A column-parallel layer of several parts, as one of ``size`` ranks builds it."""
    layer = Rank(rank, size)
    method = Glm5LinearMethod(module)
    rows = [part.rows // size for part in module.parts]
    method.create_weights(layer, module.parts[0].columns, rows, 0, 0, torch.float32)
    layer.quant_method = method
    fill(nn.ModuleDict({"linear": layer}))
    return layer


@pytest.mark.parametrize(
    ("key", "prefix", "sets"),
    [("A", "layers.2.mlp.shared_experts.gate_up_proj", 1), ("A", "layers.0.self_attn.fused_qkv_a_proj", 2)],
)
def test_parts_of_one_type_are_one_product(key: str, prefix: str, sets: int, model_folder: Folder) -> None:
    """Each rank's rows of every part are those of the whole weight, in the order of parts, joined or not."""
    module = modules_of(model_folder(Run(key)))[f"model.{prefix}"]
    x = torch.randn(3, module.parts[0].columns, generator=torch.Generator().manual_seed(6))

    def parts_of(rank: int, size: int) -> tuple[torch.Tensor, ...]:
        layer = linear_layer(module, rank, size)
        assert len(layer.quant_method.parameters.planes(layer)) == sets
        out: torch.Tensor = layer.quant_method.apply(layer, x)
        return out.split([part.rows // size for part in module.parts], dim=-1)

    whole, first, second = parts_of(0, 1), parts_of(0, 2), parts_of(1, 2)
    for one, a, b in zip(whole, first, second, strict=True):
        torch.testing.assert_close(torch.cat((a, b), dim=-1), one)
    assert not torch.equal(whole[0][..., :8], whole[1][..., :8])


def test_operations_hold_their_contract_with_the_compiler() -> None:
    planes = [empty_planes("Q5_K", 32, 256), empty_planes("Q8_0", 64, 256)]
    tensors = [tensor.zero_() for p in planes for tensor in p.tensors]
    spec = "Q5_K:32:256,Q8_0:64:256"
    x = torch.randn(3, 256)
    torch.library.opcheck(ops.linear, (x, tensors, spec))
    torch.library.opcheck(ops.embed, (torch.tensor([1, 5]), list(planes[1].tensors), "Q8_0:64:256", torch.bfloat16))
    compiled = torch.compile(lambda x: ops.linear(x * 2, tensors, spec) + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), torch.ones(3, 96))
    with pytest.raises(ValueError, match="planes more"):
        ops.assemble("Q8_0:64:256", tensors)


def test_packed_bits_beside_a_scale_are_not_taken_for_numbers() -> None:
    planes = empty_planes("IQ4_XS", 32, 256)
    assert planes.halves is not None
    planes.halves[:, :, 0] = 0
    planes.halves[:, :, 1] = -1  # as fp16 this is NaN
    assert scales_are_finite(planes)
    planes.halves[:, :, 0] = -1
    assert not scales_are_finite(planes)
