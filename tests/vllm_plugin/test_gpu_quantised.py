"""On CUDA GPUs: products with weights as the file has them, and two ranks that hold a part of them each.

Where there is one GPU both ranks run on it, each as a machine of its own, which NCCL joins over sockets or on the GPU
(`tests/support/one_gpu.py`, which also says what GPU_SERVERS_ONE_GPU may ask for); what is checked stays the same.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.quants.blocks import random_rows
from tests.support import one_gpu
from tests.support.compare import relative_rms, selected_difference
from tests.support.goldens import PROMPTS, prompts, references
from tests.support.gpu_servers import GpuRun, Result, ask_lengths, ask_prompts, ask_together, bf16
from tests.vllm_plugin.test_gpu import check_loaded, check_prompts, recorded

pytestmark = pytest.mark.gpu

QUANTISED = ("--model-loader-extra-config", json.dumps({"weights": "quantised"}))
ALL = (ask_prompts, ask_together, ask_lengths)
RUNS = (
    GpuRun("B-Q8-tp2", bf16("B-Q8", tp=2), ALL, flags=QUANTISED),
    GpuRun(
        "B-Q8-tp2-experts", bf16("B-Q8", tp=2), ALL, flags=(*QUANTISED, "--enable-expert-parallel"), joined="shared"
    ),
)
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)


@every_run
def test_prompts_match_the_reference_over_two_ranks(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    check_prompts(run, gpu_results)


@every_run
def test_both_ranks_select_the_same_and_near_the_reference(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    record = recorded(gpu_results, run)
    for name, reference in references(run.run.key, run.expected).items():
        first, second = record.selections[name]
        assert first == second, name
        if reference.selected:
            assert selected_difference(reference, first) <= run.topk / 10, name


@every_run
def test_decoded_steps_match_a_forward_pass_over_two_ranks(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    answers = recorded(gpu_results, run).answers
    check_loaded(run, [(prompts()[name].ids, answers[name]) for name in PROMPTS], gpu_results[run.name])
    check_loaded(run, gpu_results[run.name].together, gpu_results[run.name])


@every_run
def test_each_rank_read_its_part_and_compiled_before_serving(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    recorded(gpu_results, run)
    result = gpu_results[run.name]
    assert len(set(re.findall(r"rank (\d): [\d.]+ GB of quantised weights read in", result.log))) == 2
    if not (result.joined and one_gpu.EAGER):
        assert "Graph capturing finished" in result.log or "Capturing CUDA graphs" in result.log
    assert {line["phase"] for line in result.compiled} == {"warm-up"}
    assert len({line["pid"] for line in result.compiled}) == 2


@every_run
def test_nccl_joined_both_ranks(run: GpuRun, gpu_results: dict[str, Result]) -> None:
    """NCCL's own log: communicators of two ranks, on which devices, and over what they talk."""
    recorded(gpu_results, run)
    result = gpu_results[run.name]
    found = re.findall(r"rank (\d+) nranks 2 cudaDev (\d+) nvmlDev (\d+) busId (\w+) .*Init COMPLETE", result.nccl)
    ways = Counter(re.findall(r"via (NET/\w+|P2P/\w+|SHM/?\w*)", result.nccl))
    versions = set(re.findall(r"NCCL version (\S+)", result.nccl))
    form = f"one GPU, {result.joined.way}, {result.joined.said}" if result.joined else "a GPU each"
    form += ", without graphs" if result.joined and result.joined.eager else ""
    ranks = sorted(set(found))
    print(f"{run.name}: {form}; NCCL {versions}; rank, device, NVML device, bus {ranks}; connections {dict(ways)}")
    assert {rank for rank, *_ in found} == {"0", "1"}
    assert len({bus for *_, bus in found}) == (1 if result.joined else 2)
    assert ways
    if result.joined and result.joined.way == "sockets":
        assert set(ways) == {"NET/Socket"}


TOKENS = (1, 2, 17, 100, 512)


@pytest.mark.parametrize("spec", ["Q5_K:2048:6144,Q8_0:576:6144", "Q4_K:256:2048", "Q6_K:100:6144,BF16:28:6144"])
def test_the_linear_operation_is_near_the_reference(spec: str) -> None:
    from glm5deploy.quants import reference
    from glm5deploy.quants.planes import repack
    from glm5deploy.vllm_plugin import quantised_ops as ops

    parts = []
    for i, part in enumerate(spec.split(",")):
        kind, rows, columns = part.split(":")
        parts.append(repack(kind, random_rows(kind, int(rows), int(columns), i).cuda()))
    tensors = [tensor for p in parts for tensor in p.tensors]
    for tokens in TOKENS:
        x = torch.randn(tokens, parts[0].columns, device="cuda", dtype=torch.bfloat16)
        expected = torch.cat([reference.linear(x, p) for p in parts], dim=1)
        error = relative_rms(ops.linear(x, tensors, spec).float(), expected)
        print(f"{spec} at {tokens} tokens: {error:.2e}")
        assert error <= 6e-3  # 4e-3 of the product, and the rounding of the result to bf16


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "Q6_K", "BF16"])
def test_the_embedding_is_near_the_reference(kind: str) -> None:
    from glm5deploy.quants.planes import repack
    from glm5deploy.quants.reference import dequantize_planes
    from glm5deploy.vllm_plugin import quantised_ops as ops

    planes = repack(kind, random_rows(kind, 1000, 6144).cuda())
    for count in (1, 7, 300):
        ids = torch.randint(0, 1000, (count,), device="cuda")
        found = ops.embed(ids, list(planes.tensors), f"{kind}:1000:6144", torch.bfloat16)
        assert relative_rms(found.float(), dequantize_planes(planes)[0][ids]) <= 4e-3


@pytest.mark.parametrize("ranks", [1, 4])
def test_experts_replayed_from_a_graph_follow_their_inputs(ranks: int, tmp_path: Path) -> None:
    """The expert method under a CUDA graph, whole or as one of four expert-parallel ranks, chunked and not."""
    from glm5deploy.quants import reference
    from glm5deploy.vllm_plugin import quantised_ops as ops
    from glm5deploy.vllm_plugin.quantised_modules import Module
    from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod
    from glm5deploy.vllm_plugin.rank_reader import Reader
    from glm5deploy.vllm_plugin.slabs import Source
    from tests.vllm_plugin.test_quantised import expert_layer
    from tests.vllm_plugin.test_rank_reader import random_tensor

    shapes = (("Q4_K", 1024, 512), ("Q5_K", 1024, 512), ("Q6_K", 512, 1024))
    tensors = [random_tensor(tmp_path / "w", kind, k, n, 16, i) for i, (kind, k, n) in enumerate(shapes)]
    module = Module("experts", tuple(Source(t, t.name, t.shape[1], 16) for t in tensors))
    with torch.device("cuda"):
        layer = expert_layer(module, 16, [*range(1, 16, ranks)] if ranks > 1 else [*range(16)])
    method = layer.quant_method
    assert isinstance(method, Glm5MoeMethod)
    Reader(torch.device("cuda"), most=1 << 20).fill(list(method.slabs(layer)))
    planes = method.parameters.planes(layer)

    def check(state: SimpleNamespace, found: torch.Tensor) -> None:
        ids = state.ids if layer.expert_map is None else layer.expert_map[state.ids]
        assert relative_rms(found.float(), reference.moe(state.x, *planes, ids, state.weights)) <= 8e-3

    for tokens in (1, 8, 300, ops.MOE_TOKENS + 5):
        state = SimpleNamespace()

        def fill_in(seed: int, tokens: int = tokens, state: SimpleNamespace = state) -> None:
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(tokens, 1024, device="cuda", generator=generator).bfloat16()
            ids = torch.rand(tokens, 16, device="cuda", generator=generator).argsort(dim=1)[:, :4].to(torch.int32)
            weights = torch.rand(tokens, 4, device="cuda", generator=generator)
            for name, value in (("x", x), ("ids", ids), ("weights", weights)):
                if hasattr(state, name):
                    getattr(state, name).copy_(value)
                else:
                    setattr(state, name, value)

        fill_in(1)
        check(state, method.apply(layer, state.x, state.weights, state.ids, None, None))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = method.apply(layer, state.x, state.weights, state.ids, None, None)
        for seed in (2, 3):
            fill_in(seed)
            graph.replay()
            check(state, out)
