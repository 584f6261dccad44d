"""Layers with fused operations against vLLM's own: ``python -m tests.support.interpreted_layer FOLDER``.

The real model is built by the real loader, and each layer's attention runs a step of prompts and one of decoding, with
padding as CUDA graphs add it, over caches full of NaN. Prints a JSON object: ``built`` is how layers are built here,
``layers`` has a record for each layer and fusion (the largest relative error of ``outputs`` and of the ``cache``,
``selected`` positions that differ, how often each kernel was ``launched``, whether a ``profiled`` run gives numbers),
``obstacles`` says why changed layers would not be fused, ``compiled`` whether torch.compile takes a layer whole, and
``resolved`` how often layers with a selection and with a shared one looked up cache rows in two steps. ``norms`` comes
from :mod:`tests.support.interpreted_norms`. Kernels run under Triton's interpreter, so this is a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter, before anything imports Triton

import torch  # isort: skip
import glm5deploy.vllm_plugin
from glm5deploy.kernels import attention, index_input, latent_input, query_input, row_product
from glm5deploy.kernels.warmup import Serving
from glm5deploy.vllm_plugin import device, engine_config, host, selection
from glm5deploy.vllm_plugin.latent_attention import Glm5LatentAttention, both_queries, why_not
from glm5deploy.vllm_plugin.metadata import SparseMetadataBuilder
from tests.support.built_model import load, single_rank

BLOCK, BLOCKS, PADDING = 64, 4, 2
# Queries and contexts of two requests, and the blocks that each of them has.
Steps = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
STEPS: Steps = (((70, 5), (70, 5)), ((1, 1), (71, 6)))
FUSIONS = engine_config.FUSIONS[1:]
TABLE = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)


def step(
    config: Any, queries: tuple[int, ...], contexts: tuple[int, ...], padding: int = PADDING
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Metadata of a step, and positions and slots [T] of its tokens with padding behind them."""
    where = [(r, p) for r, n in enumerate(queries) for p in range(contexts[r] - n, contexts[r])]
    slots = [int(TABLE[r, p // BLOCK]) * BLOCK + p % BLOCK for r, p in where]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    common: Any = SimpleNamespace(
        num_reqs=len(queries),
        num_actual_tokens=len(where),
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        block_table_tensor=TABLE,
    )
    several, one = (SparseMetadataBuilder(None, [], config, torch.device("cpu")) for _ in range(2))
    one._at_once = True
    metadata, same = several.build(0, common), one.build(0, common)
    assert torch.equal(same.request_of_token, metadata.request_of_token)
    assert torch.equal(same.lengths, metadata.lengths)
    return metadata, torch.tensor([p for _, p in where] + [0] * padding), torch.tensor(slots + [-1] * padding)


def run(
    config: Any,
    layer: Glm5LatentAttention,
    fusion: str,
    steps: Steps = STEPS,
    padding: int = PADDING,
    first: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of all steps, the latent cache after them, and what was selected in the last.

    ``first`` is how the first step runs where it is not ``fusion``, too.
    """
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    fuse(layer, first or fusion)
    names = [layer.mla_attn.layer_name]
    layer.mla_attn.kv_cache = torch.full((BLOCKS, BLOCK, 576), torch.nan)
    if layer.indexer is not None:
        layer.indexer.k_cache.kv_cache = torch.full((BLOCKS, BLOCK, 132), 0xFF, dtype=torch.uint8)
        names.append(layer.indexer.k_cache.prefix)
    generator = torch.Generator().manual_seed(7)
    outputs = []
    for queries, contexts in steps:
        metadata, positions, slots = step(config, queries, contexts, padding)
        hidden = torch.randn(len(positions), layer.hidden_size, generator=generator)
        context = set_forward_context(
            dict.fromkeys(names, metadata), config, slot_mapping=dict.fromkeys(names, slots), num_tokens=len(positions)
        )
        with set_current_vllm_config(config), context, torch.inference_mode():
            outputs.append(layer(positions, hidden)[: sum(queries)])
        fuse(layer, fusion)
    selected = layer.mla_attn.impl.topk_indices_buffer[: sum(steps[-1][0])].clone()
    return torch.cat(outputs), layer.mla_attn.kv_cache, selected


def fuse(layer: Glm5LatentAttention, fusion: str) -> None:
    """Run the layer's operations as on a GPU with this setting, as far as kernels take the place of others in it."""
    layer.fusion = fusion
    layer.both_queries = both_queries(layer) if engine_config.reaches(fusion, "experts") else None
    if layer.indexer is not None:
        layer.indexer.own_product = engine_config.reaches(fusion, "experts")
    kernels = SimpleNamespace(**vars(host))
    if engine_config.reaches(fusion, "experts"):
        kernels.index_input = device.index_input
    selection._kernels = lambda device: kernels


def profiled(config: Any, layer: Glm5LatentAttention, fusion: str) -> bool:
    """Whether a profiling run, without caches and metadata, gives numbers."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    fuse(layer, fusion)
    layer.mla_attn.kv_cache = torch.tensor([])
    hidden = torch.randn(3, layer.hidden_size)
    context = set_forward_context(None, config, slot_mapping={}, num_tokens=3)
    with set_current_vllm_config(config), context, torch.inference_mode():
        out = layer(torch.zeros(3, dtype=torch.int64), hidden)
    return bool(out.isfinite().all())


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Infinite where one is NaN and the other is not."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    return float((found - expected).nan_to_num().abs().max() / expected.nan_to_num().abs().max())


def count_launches() -> Counter[str]:
    """How often the host side of each kernel is called from here on."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **named)

        return call

    latent_input.latent_input = counted("latents", latent_input.latent_input)
    query_input.query_input = counted("queries", query_input.query_input)
    index_input.index_input = counted("index", index_input.index_input)
    row_product.row_product = counted("product", row_product.row_product)
    attention.value_output = counted("values", attention.value_output)
    device.slots_from_positions = counted("slots", device.slots_from_positions)
    plain = query_input.query_input

    def looking_up(*arguments: Any) -> Any:
        if arguments[-1] is not None:
            counts["looked up"] += 1
        return plain(*arguments)

    query_input.query_input = looking_up
    return counts


def compare(config: Any, layer: Glm5LatentAttention, counts: Counter[str]) -> list[dict[str, Any]]:
    out, cache, selected = run(config, layer, "off")
    assert bool(out.isfinite().all())
    assert 0 < int(cache.isnan().any(-1).sum()) < BLOCKS * BLOCK
    records = []
    for fusion in FUSIONS:
        counts.clear()
        found = run(config, layer, fusion)
        records.append(
            {
                "fusion": fusion,
                "indexer": layer.indexer is not None,
                "launched": dict(counts),
                "outputs": error(found[0], out),
                "cache": error(found[1], cache),
                "selected": int((found[2] != selected).sum()),
                "profiled": profiled(config, layer, fusion),
            }
        )
    return records


def compiled(config: Any, layer: Glm5LatentAttention, fusion: str) -> bool:
    """Whether torch.compile takes the layer whole, for any number of tokens, and gives the same numbers."""
    expected = run(config, layer, fusion)[0]
    plain = layer.forward
    torch._dynamo.reset()
    layer.forward = torch.compile(plain, backend="eager", fullgraph=True, dynamic=True)  # type: ignore[method-assign]
    found = run(config, layer, fusion)[0]
    layer.forward = plain  # type: ignore[method-assign]
    return torch.equal(found, expected)


def resolved(config: Any, layers: list[Glm5LatentAttention], counts: Counter[str]) -> int:
    """Steps of both layers together, each with metadata that vLLM would make for it; lookups of cache rows."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    counts.clear()
    for queries, contexts in STEPS:
        metadata, positions, slots = step(config, queries, contexts)
        per_layer: dict[str, Any] = {}
        for layer in layers:
            fuse(layer, "experts")
            layer.mla_attn.kv_cache = torch.zeros(BLOCKS, BLOCK, 576)
            per_layer[layer.mla_attn.layer_name] = replace(metadata)
            if layer.indexer is not None:
                layer.indexer.k_cache.kv_cache = torch.zeros(BLOCKS, BLOCK, 132, dtype=torch.uint8)
                per_layer[layer.indexer.k_cache.prefix] = metadata
        hidden = torch.randn(len(positions), layers[0].hidden_size)
        context = set_forward_context(
            per_layer, config, slot_mapping=dict.fromkeys(per_layer, slots), num_tokens=len(positions)
        )
        with set_current_vllm_config(config), context, torch.inference_mode():
            for layer in layers:
                layer(positions, hidden)
    assert not counts["slots"]
    return counts["looked up"]


def give_weight_back(projection: Any) -> None:
    """As a GPU's engine has it: a CPU's keeps a packed one of its own."""
    of_ones = projection(torch.eye(projection.input_size))[0]
    projection.weight = torch.nn.Parameter(of_ones.T.contiguous(), requires_grad=False)


def obstacles(layer: Any) -> list[str | None]:
    """Of the layer as it is, and with one thing after the other changed."""
    found = [why_not(layer)]
    for part, name, value in (
        (layer, "g_proj", torch.nn.Identity()),
        (layer.rotary_emb, "is_neox_style", True),
        (layer.kv_a_layernorm, "variance_epsilon", 0.5),
        (layer.mla_attn, "impl", None),
    ):
        before = getattr(part, name)
        setattr(part, name, value)
        found.append(why_not(layer))
        setattr(part, name, before)
    return found


def reserve(layer: Glm5LatentAttention, config: Any) -> None:
    """The memory that a GPU's launches share."""
    heads = (layer.num_heads, layer.indexer.n_head, layer.indexer.topk_tokens)
    sizes = (config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len, BLOCK)
    serving = Serving(*heads, *sizes, packed=False, dtype=torch.float32, index_at_once=True)
    device._scratch[torch.device("cpu")] = device.Scratch(serving, torch.device("cpu"))


def main() -> None:
    from tests.support import interpreted_norms

    glm5deploy.vllm_plugin.register()
    counts = count_launches()
    with single_rank():
        config, model = load(Path(sys.argv[1]), "quantised")
        layers = [layer.self_attn.mla_attn for layer in model.model.layers[:2]]  # with an indexer, and without
        reserve(layers[0], config)
        give_weight_back(layers[0].indexer.wk_weights_proj)
        report = {
            "built": [layer.fusion for layer in layers],
            "obstacles": obstacles(layers[0]),
            "compiled": [compiled(config, layers[0], fusion) for fusion in engine_config.FUSIONS],
            "layers": [record for layer in layers for record in compare(config, layer, counts)],
            "resolved": resolved(config, layers, counts),
            "norms": interpreted_norms.report(config, model),
        }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
