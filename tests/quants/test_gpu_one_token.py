"""On a GPU: a layer of experts for one token, and how long it takes: with the shared one among them, and beside them.

Run there with `pytest -m gpu -s tests/quants/test_gpu_one_token.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from glm5deploy.kernels.measure import graph_time, relative_rms
from glm5deploy.quants import one_token, products, reference, routed_experts
from glm5deploy.quants.planes import Planes, repack
from glm5deploy.quants.token_experts import Choice, Shared
from tests.quants.blocks import random_rows

pytestmark = pytest.mark.gpu

HIDDEN, UNITS, EXPERTS, TOPK, LAYERS = 6144, 256, 32, 8, 10  # a rank of eight; of its 256 experts no more are needed
Layer = tuple[tuple[Planes, Planes, Planes], Shared]


def planes(name: str, rows: int, columns: int, experts: int = 1) -> Planes:
    raw = random_rows(name, rows, columns).cuda()
    return repack(name, raw.expand(experts, -1, -1).contiguous())


@pytest.fixture(scope="module", params=["Q4_K", "Q6_K"])
def layers(request: pytest.FixtureRequest) -> list[Layer]:
    down = request.param
    shapes = (("Q4_K", UNITS, HIDDEN), ("Q4_K", UNITS, HIDDEN), (down, HIDDEN, UNITS))
    found = []
    for _ in range(LAYERS):
        gate, up, last = (planes(*shape, EXPERTS) for shape in shapes)
        shared = Shared((planes("Q5_K", 2 * UNITS, HIDDEN),), planes("Q6_K", HIDDEN, UNITS))
        found.append(((gate, up, last), shared))
    return found


def beside(x: torch.Tensor, layer: Layer, chosen: tuple[torch.Tensor, ...], stream: torch.cuda.Stream) -> torch.Tensor:
    """The shared expert on a stream of its own."""
    experts, shared = layer
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both = products.linear(x, shared.gate_up[0])
        out = products.linear(torch.nn.functional.silu(both[:, :UNITS]) * both[:, UNITS:], shared.down)

    def joined() -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(stream)
        return out

    return routed_experts.moe(x, *experts, *chosen, also=joined)


def test_a_layer_of_experts(layers: list[Layer]) -> None:
    stream, x = torch.cuda.Stream(), torch.randn(1, HIDDEN, device="cuda").bfloat16()
    choice = Choice(torch.randn(1, EXPERTS, device="cuda"), torch.rand(EXPERTS, device="cuda"), TOPK, 2.5)
    chosen = choice.chosen()
    ways: dict[str, Callable[[Layer], torch.Tensor]] = {
        "without the shared expert": lambda layer: routed_experts.moe(x, *layer[0], *chosen),
        "beside": lambda layer: beside(x, layer, chosen, stream),
        "among them, and chosen there": lambda layer: one_token.experts(x, *layer[0], layer[1], choice),
    }
    expected = reference.experts_of_one(x, *layers[0][0], layers[0][1], choice)
    told = []
    for way, call in ways.items():
        if way != "without the shared expert":
            assert relative_rms(call(layers[0]), expected) < 8e-3, way
        time = graph_time([lambda layer=layer, call=call: call(layer) for layer in layers], per_graph=LAYERS)
        told.append(f"{way} {time:.2f}")
    print(f"\n{layers[0][0][2].format.name}: {', '.join(told)} us")
