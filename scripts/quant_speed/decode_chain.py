"""A decoded token's way through several layers' products, each waiting for the one before, in one CUDA graph.

Attention, norms and routing are left out; experts are chosen beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from glm5deploy.kernels.measure import graph_time
from glm5deploy.quants import products
from glm5deploy.quants.planes import Planes
from quant_speed import cases, decode

LAYERS = 8
MODES = ("two launches", "one launch")  # for q_a and kv_a
_WEIGHTS = {
    "q_a": ("Q5_K", 2048, 6144), "kv_a": ("Q8_0", 576, 6144), "q_b": ("Q8_0", 2048, 2048), "o": ("Q5_K", 6144, 2048),
    "gate, up": ("Q5_K", 512, 6144), "down": ("Q6_K", 6144, 256),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer's linear weights, and the experts that the token goes to."""

    weights: dict[str, Planes]
    ids: torch.Tensor
    share: torch.Tensor


def layers() -> list[Layer]:
    found = []
    for _ in range(LAYERS):
        weights = {what: cases.weights(*shape).planes for what, shape in _WEIGHTS.items()}
        call = cases.routed(1, 1)[0]
        found.append(Layer(weights, call.ids, call.share / call.share.sum()))
    return found


def _level(x: torch.Tensor) -> torch.Tensor:
    """Numbers of size one again, as a norm would make them."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


def run(x: torch.Tensor, stack: list[Layer], experts: tuple[Planes, ...], mode: str) -> torch.Tensor:
    """[1, HIDDEN] to the same, through every layer."""
    for layer in stack:
        w = layer.weights
        pair = w["q_a"], w["kv_a"]
        both = decode.call_linear(_level(x), pair, decode.linear_variants(pair, (2048, 576), 1)[mode])
        x = _level(products.linear(products.linear(_level(both[:, :2048]), w["q_b"]), w["o"]))
        hidden = _level(products.linear(x, w["gate, up"])[:, 256:])
        x = products.linear(hidden, w["down"]) + products.moe(x, *experts, layer.ids, layer.share)
    return x


def times(names: tuple[str, str, str]) -> Iterator[tuple[str, float, bool]]:
    """Mode, microseconds a layer, and whether a graph gives what single launches gave, every bit."""
    stack, experts = layers(), tuple(w.planes for w in cases.expert_weights(names))
    x, other = cases.activations(1, cases.HIDDEN), cases.activations(1, cases.HIDDEN)
    for mode in MODES:
        same = all(_same(run(start, stack, experts, mode), start, stack, experts, mode) for start in (x, other))
        yield mode, graph_time([partial(run, x, stack, experts, mode)], 10, 2) / LAYERS, same


def _same(expected: torch.Tensor, x: torch.Tensor, stack: list[Layer], experts: tuple[Planes, ...], mode: str) -> bool:
    """Replays of a graph, with other numbers in memory before each, against ``expected``."""
    start = torch.zeros_like(x)
    run(start, stack, experts, mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(start, stack, experts, mode)
    equal = True
    for _ in range(5):
        start.normal_()
        graph.replay()
        start.copy_(x)
        graph.replay()
        equal &= torch.equal(out, expected)
    return equal
