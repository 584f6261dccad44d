"""Does warm-up launch every variant of the products? ``python -m tests.vllm_plugin.product_keys``.

Prints what :func:`tests.support.launch_keys.compare` found over layers of many types and shapes, as JSON, had sums with
a shared expert, and one token's launches with one, been left out; runners of experts with fewer launches and pairs of
layers are among them. A process of its own: the tests' process interprets kernels. Nothing is computed, cuBLAS's part
neither.
"""

from __future__ import annotations

import json
import random
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from glm5deploy.quants import gpu, products, routed_experts
from glm5deploy.vllm_plugin import experts, experts_warmup, product_warmup
from glm5deploy.vllm_plugin import quantised_ops as ops
from glm5deploy.vllm_plugin.linear_pair import LinearPair
from glm5deploy.vllm_plugin.quantised_linear import Glm5EmbeddingMethod, Glm5LinearMethod, PlaneParameters
from glm5deploy.vllm_plugin.quantised_modules import Module
from glm5deploy.vllm_plugin.quantised_moe import Glm5MoeMethod
from tests.support import launch_keys

TOKENS = 2048
TOPK = 8


class Layer(nn.Module):
    """Planes of one module, without what fills them."""

    def __init__(self, method: type[Any], *parts: tuple[str, int, int], experts: int = 1) -> None:
        super().__init__()
        self.quant_method = method.__new__(method)
        sources = tuple(SimpleNamespace(planes_type=part[0]) for part in parts)
        parameters = PlaneParameters(Module("m", sources))  # type: ignore[arg-type]
        self.quant_method.parameters = parameters
        parameters.create(self, [part[1:] for part in parts], experts, join=method is Glm5LinearMethod)
        self.moe_config = SimpleNamespace(experts_per_token=TOPK)
        self.expert_map = None


class Runner(experts.Glm5ExpertsRunner):
    """Around the experts of a layer, without what vLLM builds beside them."""

    def __init__(self, layer: Layer, shared: tuple[Layer, Layer] | None = None) -> None:
        nn.Module.__init__(self)
        self.routed_experts, self.together = layer, shared is not None
        gate = layer.quant_method.parameters.planes(layer)[0]
        bias = torch.zeros(gate.experts)
        self.router = SimpleNamespace(
            top_k=TOPK,
            e_score_correction_bias=bias,
            routed_scaling_factor=2.5,
            capture_fn=None,
            _routing_replay_out=None,
        )
        self.gate = lambda x: (torch.zeros(len(x), gate.experts), None)
        if shared:
            both = SimpleNamespace(gate_up_proj=shared[0], down_proj=shared[1])
            self._shared_experts = SimpleNamespace(_layer=both)


def layers() -> list[Layer]:
    few = (
        (8, routed("Q4_K", "Q4_K", "Q6_K")),
        (40, routed("IQ3_S", "Q4_K", "Q8_0", hidden=320, inner=96)),
        (1, routed("Q5_K", "Q5_K", "Q5_0")),  # one product with integers, the other without
        (8, routed("Q8_0", "Q8_0", "Q6_K", inner=2560)),  # long activations of the second
    )
    return [
        Layer(Glm5LinearMethod, ("Q4_K", 2048, 6144), ("Q6_K", 576, 6144)),
        Layer(Glm5LinearMethod, ("Q8_0", 512, 6144), ("Q8_0", 512, 6144)),
        Layer(Glm5LinearMethod, ("Q5_K", 2048, 2048)),
        Layer(Glm5LinearMethod, ("IQ4_XS", 6144, 256)),
        Layer(Glm5LinearMethod, ("Q5_K", 8464, 2304)),  # long, as an output head
        Layer(Glm5LinearMethod, ("Q4_0", 200, 96)),  # no multiple of 16 rows, no whole super-block
        Layer(Glm5LinearMethod, ("Q8_0", 72, 288), ("Q5_1", 40, 288)),
        *(Layer(Glm5MoeMethod, *parts, experts=count) for count, parts in few),
        Layer(Glm5EmbeddingMethod, ("Q4_K", 640, 512)),
        Layer(Glm5EmbeddingMethod, ("Q6_K", 640, 512)),
    ]


def routed(gate: str, up: str, down: str, hidden: int = 512, inner: int = 256) -> list[tuple[str, int, int]]:
    return [(gate, inner, hidden), (up, inner, hidden), (down, hidden, inner)]


def step(layer: Layer, tokens: int, dtype: torch.dtype) -> None:
    """One layer's call with rows as the engine makes them: whole, or a part of wider ones."""
    parameters = layer.quant_method.parameters
    tensors, spec = parameters.tensors(layer), parameters.spec
    columns = parameters.planes(layer)[0].columns
    wide = columns + random.choice((0, 0, 16, 576))
    x = torch.zeros(tokens, wide, dtype=dtype)[:, :columns]
    if isinstance(layer.quant_method, Glm5MoeMethod):
        ids = torch.randint(-1, 8, (tokens, TOPK), dtype=torch.int32)
        ops.moe(x, tensors, spec, ids, torch.rand(tokens, TOPK))
        if tokens <= experts.MOST_TOKENS:
            fewer(Runner(layer), x, ids)
        for runner in runners_of(layer) if tokens == 1 else ():
            if runner.together:
                runner.of_this_rank(x)
    elif isinstance(layer.quant_method, Glm5EmbeddingMethod):
        ops.embed(torch.zeros(tokens, dtype=torch.int64), tensors, spec, dtype)
    else:
        ops.linear(x, tensors, spec)


def runners_of(layer: Layer) -> list[Runner]:
    """With a shared expert of two types or of three."""
    gate, _, down = layer.quant_method.parameters.planes(layer)
    if gate.experts < TOPK:
        return [Runner(layer)]
    found = []
    for types in (("Q5_K", "Q5_K", "Q6_K"), ("Q8_0", "Q5_0", "IQ4_XS")):
        parts = [(name, gate.rows, gate.columns) for name in types[:2]]
        shared = Layer(Glm5LinearMethod, *parts), Layer(Glm5LinearMethod, (types[2], down.rows, gate.rows))
        found.append(Runner(layer, shared))
    return found


def fewer(runner: Runner, x: torch.Tensor, ids: torch.Tensor) -> None:
    """What a runner with fewer launches calls, beside the products of its experts."""
    beside = torch.zeros(x.shape, dtype=x.dtype)
    runner.routed_experts.quant_method.sum(runner.routed_experts, x, torch.rand(ids.shape), ids, lambda: beside)


def two() -> list[LinearPair]:
    """Queries and index queries on one of eight ranks, of one type and of two; and layers that are a pair elsewhere."""
    shapes = ((("Q8_0", 2048, 2048), ("Q8_0", 4096, 2048)), (("Q6_K", 2048, 2048), ("Q5_K", 4096, 2048)))
    odd = (("Q4_0", 200, 96), ("Q8_0", 72, 96))
    return [LinearPair(*(Layer(Glm5LinearMethod, part) for part in parts)) for parts in (*shapes, odd)]


def use_products() -> None:
    """Operations on a CPU take the GPU's way."""

    def moe(x: torch.Tensor, gate: Any, up: Any, down: Any, ids: Any, weights: Any, out: Any, also: Any) -> None:
        routed_experts.moe(x, gate, up, down, ids, weights, out=out, also=also)

    def rows(picked: Any, dtype: torch.dtype) -> torch.Tensor:
        return products.unpack_rows(picked, 0, picked.rows, dtype)

    ops._linear, ops._moe, ops._rows, ops._one = ops._linear_on_gpu, moe, rows, ops._one_on_gpu
    torch.matmul = lambda x, w, out: out
    gpu.describe = lambda x: gpu.Gpu(132, True, True)


def main() -> None:
    launch_keys.pretend(90)
    use_products()
    random.seed(0)
    held = layers()
    product_warmup.remember(held)
    routed_layers = [layer for layer in held if isinstance(layer.quant_method, Glm5MoeMethod)]
    runners = [runner for layer in routed_layers for runner in runners_of(layer)]
    experts.fused.extend(weakref.ref(runner) for runner in runners)

    together = two()

    def steps() -> None:
        for tokens in (*range(1, 70), *random.sample(range(70, TOKENS), 30), TOKENS):
            for layer in held:
                step(layer, tokens, torch.bfloat16)
            for pair in together:
                pair(torch.zeros(tokens, pair.planes()[0].columns, dtype=torch.bfloat16))

    prepared = [*product_warmup.launches(TOKENS, torch.bfloat16), *experts_warmup.launches(torch.bfloat16)]
    print(json.dumps(launch_keys.compare(prepared, steps, "sum", "together")))


if __name__ == "__main__":
    main()
