"""On a CUDA GPU: the reference sets served with their weights as the file has them, with CUDA graphs on.

All servers are started side by side; run with ``pytest -m gpu tests/vllm_plugin/test_gpu_quantised.py -s``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.quants.blocks import random_rows
from tests.support.compare import logprob_limit, logprob_median, relative_rms, selected_difference
from tests.support.goldens import PROMPTS, prompts, references
from tests.vllm_plugin.conftest import Run
from tests.vllm_plugin.test_gpu import GpuRun, Result, _record, _serve, bf16, check_decoding, check_greedy

pytestmark = pytest.mark.gpu

QUANTISED = ("--model-loader-extra-config", json.dumps({"weights": "quantised"}))
DENSE = ("--model-loader-extra-config", json.dumps({"weights": "dense"}))
DRAFT = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2}))

RUNS = (
    GpuRun("A", bf16("A"), flags=QUANTISED),
    GpuRun("B-Q4", bf16("B-Q4"), flags=QUANTISED),
    GpuRun("B-Q8", bf16("B-Q8"), flags=QUANTISED),
    GpuRun("A-mtp", bf16("A"), flags=(*QUANTISED, *DRAFT), selections=False),
    GpuRun("A-dense", bf16("A"), flags=DENSE, selections=False),
)


@pytest.fixture(scope="session")
def servers(model_folder: Callable[[Run], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every run's record; all servers start at once, and compile their kernels where nothing is cached yet."""
    folders = {r.name: (model_folder(r.run), tmp_path_factory.mktemp("engine")) for r in RUNS}
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(RUNS)) as pool:
        patch.setattr("tests.support.engine.START_SECONDS", 450.0)
        return dict(pool.map(lambda r: (r.name, _serve(r, *folders[r.name])), RUNS))


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_logprobs_match_the_reference(run: GpuRun, servers: dict[str, Result]) -> None:
    answers = _record(servers, run).answers
    expected = references(run.run.key, run.expected)
    medians = {name: round(logprob_median(expected[name], answers[name].top), 4) for name in PROMPTS}
    print(f"{run.name}: start {servers[run.name].seconds:.0f} s, medians {medians}")
    limits = {name: logprob_limit("bfloat16", len(prompts()[name].ids)) for name in PROMPTS}
    assert all(medians[name] <= limits[name] for name in PROMPTS), medians


@pytest.mark.parametrize("run", [r for r in RUNS if r.selections], ids=lambda r: r.name)
def test_selections_are_near_the_reference(run: GpuRun, servers: dict[str, Result]) -> None:
    record = _record(servers, run)
    averages = {
        name: round(selected_difference(reference, record.selections[name][0]), 2)
        for name, reference in references(run.run.key, run.expected).items()
        if reference.selected
    }
    print(f"{run.name}: of 64 positions differ {averages}")
    assert all(average <= 64 / 10 for average in averages.values()), averages


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_greedy_tokens_match_where_the_reference_is_sure(run: GpuRun, servers: dict[str, Result]) -> None:
    check_greedy(run, servers[run.name])


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_decode_steps_give_what_a_prompt_gives(run: GpuRun, servers: dict[str, Result]) -> None:
    check_decoding(run, servers[run.name])


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_requests_served_together_are_answered_like_one_alone(run: GpuRun, servers: dict[str, Result]) -> None:
    alone = [_record(servers, run).answers[name].ids[0] for name in PROMPTS] * 3
    same = sum(a == ids[0] for a, ids in zip(alone, servers[run.name].batch, strict=True))
    print(f"{run.name}: {same} of {len(alone)} first tokens equal")
    assert same >= len(alone) - 4


@pytest.mark.parametrize("run", RUNS, ids=lambda r: r.name)
def test_weights_were_kept_as_asked_and_graphs_captured(run: GpuRun, servers: dict[str, Result]) -> None:
    _record(servers, run)
    log = servers[run.name].log
    assert ("of quantised weights read in" in log) == (run.name != "A-dense")
    assert "Graph capturing finished" in log or "Capturing CUDA graphs" in log


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
    from glm5deploy.vllm_plugin.rank_reader import Reader, Source
    from tests.vllm_plugin.test_quantised import expert_layer
    from tests.vllm_plugin.test_rank_reader import random_tensor

    shapes = (("Q4_K", 1024, 512), ("Q5_K", 1024, 512), ("Q6_K", 512, 1024))
    tensors = [random_tensor(tmp_path / "w", kind, k, n, 16, i) for i, (kind, k, n) in enumerate(shapes)]
    module = Module("experts", tuple(Source(t, t.name, t.shape[1], 16) for t in tensors))
    with torch.device("cuda"):
        layer = expert_layer(module, 16, [*range(1, 16, ranks)] if ranks > 1 else [*range(16)])
    method = layer.quant_method
    assert isinstance(method, Glm5MoeMethod)
    Reader(torch.device("cuda"), weights=1 << 20).fill(list(method.slabs(layer)))
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
