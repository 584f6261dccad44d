"""Layers with fused operations against vLLM's own: ``python -m tests.support.interpreted_layer FOLDER``.

The real model is built by the real loader, and each layer's attention runs a step of prompts and one of decoding, with
padding as CUDA graphs add it, over caches full of NaN. Prints a JSON object: ``built`` is how layers are built here,
``layers`` has a record for each layer and fusion (the largest relative error of ``outputs`` and of the ``cache``,
``selected`` positions that differ, how often each kernel was ``launched``, whether a ``profiled`` run gives numbers),
``obstacles`` says why changed layers would not be fused, and ``compiled`` whether torch.compile takes a layer whole.
The kernels run under Triton's interpreter, so this is a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter, before anything imports Triton

import torch  # isort: skip
import glm5deploy.vllm_plugin
from glm5deploy.kernels import latent_input, query_input
from glm5deploy.vllm_plugin.latent_attention import Glm5LatentAttention, why_not
from glm5deploy.vllm_plugin.metadata import SparseMetadataBuilder
from tests.support.built_model import load, single_rank

BLOCK, BLOCKS, PADDING = 64, 4, 2
# Queries and contexts of two requests, and the blocks that each of them has.
STEPS = (((70, 5), (70, 5)), ((1, 1), (71, 6)))
TABLE = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)


def step(config: Any, queries: tuple[int, ...], contexts: tuple[int, ...]) -> tuple[Any, torch.Tensor, torch.Tensor]:
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
    metadata = SparseMetadataBuilder(None, [], config, torch.device("cpu")).build(0, common)
    return metadata, torch.tensor([p for _, p in where] + [0] * PADDING), torch.tensor(slots + [-1] * PADDING)


def run(config: Any, layer: Glm5LatentAttention, fusion: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of both steps, the latent cache after them, and what was selected in the last."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    layer.fusion = fusion
    attention = layer.mla_attn
    attention.kv_cache = torch.full((BLOCKS, BLOCK, 576), torch.nan)
    names = [attention.layer_name]
    if layer.indexer is not None:
        layer.indexer.k_cache.kv_cache = torch.full((BLOCKS, BLOCK, 132), 0xFF, dtype=torch.uint8)
        names.append(layer.indexer.k_cache.prefix)
    generator = torch.Generator().manual_seed(7)
    outputs = []
    for queries, contexts in STEPS:
        metadata, positions, slots = step(config, queries, contexts)
        hidden = torch.randn(len(positions), layer.hidden_size, generator=generator)
        context = set_forward_context(
            dict.fromkeys(names, metadata), config, slot_mapping=dict.fromkeys(names, slots), num_tokens=len(positions)
        )
        with set_current_vllm_config(config), context, torch.inference_mode():
            outputs.append(layer(positions, hidden)[:-PADDING])
    return torch.cat(outputs), attention.kv_cache, attention.impl.topk_indices_buffer[: sum(STEPS[-1][0])].clone()


def profiled(config: Any, layer: Glm5LatentAttention, fusion: str) -> bool:
    """Whether a profiling run, without caches and metadata, gives numbers."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    layer.fusion = fusion
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
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    latent_input.latent_input = counted("latents", latent_input.latent_input)
    query_input.query_input = counted("queries", query_input.query_input)
    return counts


def compare(config: Any, layer: Glm5LatentAttention, counts: Counter[str]) -> list[dict[str, Any]]:
    out, cache, selected = run(config, layer, "off")
    assert bool(out.isfinite().all())
    assert 0 < int(cache.isnan().any(-1).sum()) < BLOCKS * BLOCK
    records = []
    for fusion in ("latent", "query"):
        counts.clear()
        found = run(config, layer, fusion)
        records.append(
            {
                "fusion": fusion,
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


def main() -> None:
    glm5deploy.vllm_plugin.register()
    counts = count_launches()
    with single_rank():
        config, model = load(Path(sys.argv[1]), "quantised")
        layers = [layer.self_attn.mla_attn for layer in model.model.layers[:2]]  # with an indexer, and without
        report = {
            "built": [layer.fusion for layer in layers],
            "obstacles": obstacles(layers[0]),
            "compiled": [compiled(config, layers[0], fusion) for fusion in ("off", "latent", "query")],
            "layers": [record for layer in layers for record in compare(config, layer, counts)],
        }
    sys.stdout.write("\n" + json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
