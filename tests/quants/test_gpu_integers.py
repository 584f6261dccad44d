"""On a GPU: products with integers against fp32 products of the dequantised weights, and replayed from CUDA graphs.

Run there with `pytest -m gpu tests/quants/test_gpu_integers.py`. What CI proves without one: test_integer_programs.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from glm5deploy.quants import launch, products, reference, routed_experts
from glm5deploy.quants.launch import Launch
from glm5deploy.quants.planes import Planes
from tests.quants.test_products import LIMIT, planes_of, poison, rms_error, tokens  # noqa: F401  a fixture for all

pytestmark = pytest.mark.gpu

MIXED = (
    ("Q4_K", "Q4_K", "Q4_K"), ("Q4_K", "Q5_K", "Q6_K"), ("Q6_K", "Q4_K", "Q5_K"), ("Q5_K", "Q6_K", "Q4_K"),
    ("Q2_K", "Q3_K", "Q3_K"), ("Q3_K", "Q3_K", "Q2_K"),
    ("IQ2_XXS", "IQ2_XXS", "IQ3_XXS"), ("IQ2_S", "IQ2_XS", "IQ4_XS"),
)  # fmt: skip
EXPERTS, TOPK = 6, 4


def experts(names: tuple[str, str, str], units: int, hidden: int) -> tuple[Planes, Planes, Planes]:
    gate, up = (planes_of(name, units, 512, EXPERTS, seed) for name, seed in zip(names, (0, 50), strict=False))
    return gate, up, planes_of(names[2], hidden, units, EXPERTS, 90)


def routing(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts of which the last has no tokens and the first has many; some places are other ranks'."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:TOPK] for _ in range(count)])
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return ids.to("cuda", torch.int32), torch.rand((count, TOPK), generator=generator).cuda()


def launches() -> list[tuple[Launch, Launch]]:
    few, some, many = launch.INTEGER_FEW, launch.INTEGER_SOME, launch.INTEGER_MANY
    pairs = [(replace(c, parts=parts), replace(c, tiles=count)) for c, parts, count in (
        (few, 1, 3), (few, 2, 1), (some, 1, 2), (many, 1, 12), (some, 2, 6),
    )]  # fmt: skip
    return [(a, replace(b, registers=0, stages=stages)) for (a, b), stages in zip(pairs, (3, 2, 2, 2, 3), strict=True)]


@pytest.mark.parametrize("names", MIXED, ids=str)
@pytest.mark.parametrize(("units", "hidden"), [(256, 208), (512, 64), (1024, 336)], ids=str)
def test_experts(names: tuple[str, str, str], units: int, hidden: int) -> None:
    """Rows that are no multiple of a tile, and one to four super-blocks of hidden units."""
    planes = experts(names, units, hidden)
    for count, configs in itertools.product((1, 7, 40, 130), launches()):
        if configs[1].bm * units // 256 > launch.INTEGER_X:
            continue
        x, (ids, weights) = tokens(count, 512, count), routing(count)
        expected = reference.moe(x, *planes, ids, weights)
        for _ in range(2):  # the second call finds the tickets as the first left them
            assert rms_error(routed_experts.moe(x, *planes, ids, weights, configs=configs), expected) < LIMIT


@pytest.mark.parametrize("count", [11, 100, 700])
def test_the_table_takes_them(count: int) -> None:
    planes = experts(MIXED[1], 256, 208)
    c = routed_experts._moe_launch(count, TOPK, *planes, torch.device("cuda", 0))
    assert c.gate_up.integers
    x, (ids, weights) = tokens(count, 512), routing(count)
    assert rms_error(routed_experts.moe(x, *planes, ids, weights), reference.moe(x, *planes, ids, weights)) < LIMIT


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K", "Q8_0"), ("MXFP4", "Q4_K", "Q6_K")], ids=str)
@pytest.mark.parametrize("count", [50, 300])
def test_one_product_with_integers(names: tuple[str, str, str], count: int) -> None:
    """Where a weight's type has none, the other kernels multiply the same pairs."""
    planes = experts(names, 256, 208)
    c = routed_experts._moe_launch(count, TOPK, *planes, torch.device("cuda", 0))
    assert c.gate_up.integers != c.down.integers
    x, (ids, weights) = tokens(count, 512), routing(count)
    assert rms_error(routed_experts.moe(x, *planes, ids, weights), reference.moe(x, *planes, ids, weights)) < LIMIT


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ3_S", "IQ4_XS"])
def test_linear(name: str) -> None:
    planes = planes_of(name, 208, 1536)
    tiles = (
        launch.INTEGER_FEW, launch.INTEGER_SOME, launch.INTEGER_MORE, launch.INTEGER_MANY, launch.INTEGER_LONG,
    )  # fmt: skip
    for m, c, parts in itertools.product((1, 3, 16, 33, 100), tiles, (1, 2, 5)):
        wide = tokens(m, 1792, m)
        x = wide[:, 256:]
        out = torch.full((m, 300), 7.0, device="cuda", dtype=torch.bfloat16)
        expected = reference.linear(x, planes)
        for _ in range(2):
            products.linear(x, planes, out[:, 48:256], replace(c, parts=parts))
            assert rms_error(out[:, 48:256], expected) < LIMIT
        assert (out[:, :48] == 7).all()
        assert (out[:, 256:] == 7).all()


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_activations_of_any_size(scale: float) -> None:
    """Beyond what fp16 holds by itself; a row of zeros among them."""
    planes = planes_of("Q4_K", 64, 512)
    x = (tokens(20, 512) * scale).to(torch.bfloat16)
    x[3] = 0
    found = products.linear(x, planes, config=launch.INTEGER_SOME)
    assert rms_error(found.float() / scale, reference.linear(x, planes).float() / scale) < LIMIT
    assert (found[3] == 0).all()


def test_a_graph_replays_other_numbers() -> None:
    planes, head = experts(MIXED[0], 256, 512), planes_of("Q6_K", 512, 512)
    x, (ids, weights) = tokens(40, 512), routing(40)
    configs = launches()[1]

    def step() -> torch.Tensor:
        y = routed_experts.moe(x, *planes, ids, weights, configs=configs)
        return products.linear(y, head, config=replace(launch.INTEGER_MORE, parts=2))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for seed in (5, 6):
        x.copy_(tokens(40, 512, seed))
        new_ids, new_weights = routing(40 + seed)
        ids.copy_(new_ids[:40])
        weights.copy_(new_weights[:40])
        graph.replay()
        y = reference.moe(x, *planes, ids, weights).to(torch.bfloat16)
        assert rms_error(out, reference.linear(y, head)) < 2 * LIMIT
        first = out.clone()
        graph.replay()
        assert torch.equal(first, out)
