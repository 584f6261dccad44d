"""Queries and index queries in one product against two: ``python -m tests.support.interpreted_queries FOLDER...``.

The first layer of each real model runs a prompt, and then a step of 1, 3, 16 or 17 tokens as vLLM has it on a CPU, and
as on a GPU with the product of both weights interpreted. Prints a JSON object. ``steps`` has a record for each: the
``types`` of both weights, how many ``tokens``, products of two weights that were ``launched``, how far apart tokens of
the queries and of the index queries lie beyond the width of both, as ``strides``, the largest relative error of
``outputs`` and ``cache``, and ``selected`` positions that differ. ``paired`` says of the layer as it is, and then of
changed ones, whether both products become one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support import interpreted_layer as layer_support  # chooses the interpreter, before anything imports Triton

import torch  # isort: skip
import glm5deploy.vllm_plugin
from glm5deploy.kernels import query_input
from glm5deploy.quants import products
from glm5deploy.vllm_plugin import device
from glm5deploy.vllm_plugin import quantised_ops as ops
from tests.support.built_model import load, single_rank

PROMPT = 70
TOKENS = (1, 3, 16, 17)


class Seen:
    """What passed by the host sides of kernels since it was last asked for."""

    def __init__(self) -> None:
        self.launched = 0
        self.strides: list[int] = []
        products._pair = self._counted(products._pair)
        query_input.query_input = self._with_stride(query_input.query_input)
        device.index_input_kernels.index_input = self._with_stride(device.index_input_kernels.index_input)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, first: Any, second: Any, out: torch.Tensor, c: Any) -> None:
            # Of the latents alone: hidden states have a pair of their own.
            self.launched += int(second.rows == self.rows)
            function(x, first, second, out, c)

        return call

    def _with_stride(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(q: torch.Tensor, *rest: Any) -> Any:
            self.strides.append(q.stride(0))
            return function(q, *rest)

        return call

    def on_gpu(self, on_cpu: Callable[..., None]) -> Callable[..., None]:
        """The GPU's way for a step's queries, which is slow."""

        def linear(x: torch.Tensor, parts: Any, out: torch.Tensor) -> None:
            here = len(parts) == 2 and parts[1].rows == self.rows and len(x) <= max(TOKENS)
            (ops._linear_on_gpu if here else on_cpu)(x, parts, out)

        return linear

    def reset(self, rows: int) -> None:
        """Count pairs whose second weight has so many rows."""
        self.rows, self.launched, self.strides = rows, 0, []


def records(config: Any, layer: Any, seen: Seen) -> Iterator[dict[str, Any]]:
    pair = layer_support.both_queries(layer)
    assert pair is not None
    on_cpu = ops._linear
    for tokens in TOKENS:
        steps = (((PROMPT,), (PROMPT,)), ((tokens,), (PROMPT + tokens,)))
        out, cache, selected = layer_support.run(config, layer, "off", steps, padding=0)
        seen.reset(pair.planes()[1].rows)
        ops._linear = seen.on_gpu(on_cpu)
        found = layer_support.run(config, layer, "experts", steps, padding=0, first="off")
        ops._linear = on_cpu
        yield {
            "types": [planes.format.name for planes in pair.planes()],
            "tokens": tokens,
            "launched": seen.launched,
            "strides": [stride - sum(planes.rows for planes in pair.planes()) for stride in seen.strides],
            "outputs": layer_support.error(found[0][PROMPT:], out[PROMPT:]),
            "cache": layer_support.error(found[1], cache),
            "selected": int((found[2] != selected).sum()),
        }


def paired(layer: Any) -> list[bool]:
    found = [layer_support.both_queries(layer) is not None]
    for part, name, value in (
        (layer, "skip_topk", True),
        (layer, "indexer", None),
        (layer.q_b_proj, "bias", torch.zeros(1)),
        (layer.q_b_proj, "input_size", 1),
        (layer.indexer.wq_b, "quant_method", layer.indexer.wk_weights_proj.quant_method),
        (layer.indexer, "wq_b", layer.o_proj),
    ):
        before = getattr(part, name)
        part.__dict__[name] = value  # in front of a module's parameters and parts
        found.append(layer_support.both_queries(layer) is not None)
        del part.__dict__[name]
        if getattr(part, name, None) is not before:
            part.__dict__[name] = before
    return found


def main() -> None:
    glm5deploy.vllm_plugin.register()
    seen, steps = Seen(), []
    with single_rank():
        for folder in sys.argv[1:]:
            config, model = load(Path(folder), "quantised")
            layer = model.model.layers[0].self_attn.mla_attn
            layer_support.reserve(layer, config)
            layer_support.give_weight_back(layer.indexer.wk_weights_proj)
            steps += records(config, layer, seen)
        report = {"steps": steps, "paired": paired(layer)}
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
