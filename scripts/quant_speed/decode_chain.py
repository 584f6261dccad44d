"""A decoded token's way through several layers, each launch waiting for the one before, in one CUDA graph.

The launches of a routed layer that has no indexer, as they are served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from glm5deploy.kernels import chain
from glm5deploy.kernels.add_norm import add_norm
from glm5deploy.kernels.attention import sparse_mla_values
from glm5deploy.kernels.latent_input import latent_input
from glm5deploy.kernels.layout import LATENT_DIM, QK_DIM, ROPE_DIM
from glm5deploy.kernels.measure import graph_time
from glm5deploy.kernels.query_input import query_input
from glm5deploy.kernels.row_product import row_product
from glm5deploy.quants import one_token, products
from glm5deploy.quants.planes import Planes
from glm5deploy.quants.token_experts import Choice, Shared
from quant_speed import cases

LAYERS, HEADS, NOPE, VALUES, RANK, SELECTED, POSITIONS = 8, 8, 192, 256, 2048, 2048, 4096
MODES = ("one by one", "chained")
REPLAYS = 20
_WEIGHTS = {
    "q_a": ("Q5_K", RANK, 6144), "kv_a": ("Q8_0", QK_DIM, 6144), "q_b": ("Q8_0", HEADS * (NOPE + ROPE_DIM), RANK),
    "o": ("Q5_K", 6144, HEADS * VALUES), "gate, up": ("Q5_K", 512, 6144), "down": ("Q6_K", 6144, 256),
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer's weights and its latent cache."""

    planes: dict[str, Planes]
    norms: tuple[torch.Tensor, ...]
    key_up: torch.Tensor  # W_UK [H, NOPE, 512]
    value_up: torch.Tensor  # W_UV [H, 512, V], in memory [H, V, 512]
    router: torch.Tensor
    bias: torch.Tensor
    cache: torch.Tensor


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=cases.DEVICE).mul(shape[-1] ** -0.5).bfloat16()


def layers() -> list[Layer]:
    found = []
    for _ in range(LAYERS):
        planes = {what: cases.weights(*shape).planes for what, shape in _WEIGHTS.items()}
        norms = tuple(torch.ones(n, device=cases.DEVICE).bfloat16() for n in (6144, RANK, LATENT_DIM, 6144))
        up = _normal(HEADS, NOPE, LATENT_DIM), _normal(HEADS, VALUES, LATENT_DIM).transpose(1, 2)
        router, bias = _normal(cases.EXPERTS, 6144).float(), torch.rand(cases.EXPERTS, device=cases.DEVICE) * 0.1
        found.append(Layer(planes, norms, *up, router, bias, _normal(POSITIONS // 64, 64, QK_DIM)))
    return found


def run(x: torch.Tensor, stack: list[Layer], experts: tuple[Planes, ...]) -> torch.Tensor:
    """[1, HIDDEN] to the same, through every layer."""
    place = torch.full((1,), POSITIONS - 1, device=x.device)
    cos_sin = torch.ones((POSITIONS, ROPE_DIM), device=x.device).bfloat16()
    slots = torch.arange(SELECTED, device=x.device, dtype=torch.int32)[None] * 2 + 1
    total, part = x, torch.zeros_like(x)
    for layer in stack:
        w, norms = layer.planes, layer.norms
        hidden, total = add_norm(part, total, norms[0], 1e-5)
        latents = products.linear_pair(hidden, w["q_a"], w["kv_a"])
        query = latent_input(latents, norms[1], norms[2], 1e-5, place, cos_sin, place, layer.cache)
        q = products.linear(query, w["q_b"]).view(1, HEADS, NOPE + ROPE_DIM)
        both = query_input(q, layer.key_up, place, cos_sin)
        values = q.new_empty((1, HEADS, VALUES))
        sparse_mla_values(both, layer.cache.view(-1, QK_DIM), slots, None, 0.06, layer.value_up, values)
        hidden, total = add_norm(products.linear(values.view(1, -1), w["o"]), total, norms[3], 1e-5)
        logits = row_product(hidden, layer.router)
        shared = Shared((w["gate, up"],), w["down"])
        part = one_token.experts(hidden, *experts, shared, Choice(logits, layer.bias, cases.TOPK, 2.5))
    return add_norm(part, total, stack[0].norms[0], 1e-5)[0]


def times(names: tuple[str, str, str]) -> Iterator[tuple[str, float, bool]]:
    """Mode, microseconds a layer, and whether graphs give what launches one by one gave, every bit."""
    stack, experts = layers(), tuple(w.planes for w in cases.expert_weights(names))
    starts = [cases.activations(1, cases.HIDDEN) for _ in range(2)]
    try:
        chain.allow(False)
        expected = [run(x, stack, experts) for x in starts]
        for mode in MODES:
            chain.allow(mode == "chained")
            same = _same(expected, starts, stack, experts)
            yield mode, graph_time([partial(run, starts[0], stack, experts)], 10, 2) / LAYERS, same
    finally:
        chain.allow(True)


def _same(
    expected: list[torch.Tensor], starts: list[torch.Tensor], stack: list[Layer], experts: tuple[Planes, ...]
) -> bool:
    """Replays of a graph one right behind the other, with other numbers in turn, against ``expected``."""
    start = torch.zeros_like(starts[0])
    run(start, stack, experts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(start, stack, experts)
    found = []
    for replay in range(REPLAYS):
        start.copy_(starts[replay % 2])
        graph.replay()
        found.append(out.clone())
    return all(bool(e.isfinite().all()) for e in expected) and all(
        torch.equal(value, expected[replay % 2]) for replay, value in enumerate(found)
    )
