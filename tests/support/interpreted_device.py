"""The GPU's path through one step under Triton's interpreter: ``python -m tests.support.interpreted_device``.

Prints a JSON list, of each step of the probe's numerics: how many rows are said to be written ``whole``, ``rows``
nobody selected for, selection ``errors``, and the error of ``attention`` over the plain cache and over the ``packed``
one. A process of its own, since importing vLLM and importing Triton for the interpreter otherwise happen in an order
that other tests decide.
"""

from __future__ import annotations

import json
import sys

import tests.support.triton_interpreter  # noqa: F401  chooses the interpreter, before anything imports Triton

import torch  # isort: skip
from glm5deploy.kernels.reference import pack_fp8_ds_mla, quantise_fp8, store_index_keys, unpack_fp8_ds_mla
from glm5deploy.kernels.warmup import Serving
from glm5deploy.vllm_plugin import device, numerics

CPU = torch.device("cpu")
UNWRITTEN = -7


def step(queries: tuple[int, ...]) -> dict[str, float]:
    case = numerics.make_case(CPU, torch.float32, queries)
    store_index_keys(case.index_cache, case.keys, case.slots)
    values, scale = quantise_fp8(case.q_index)
    selected = torch.full((len(case.q), numerics.TOPK), UNWRITTEN, dtype=torch.int32)
    device.select(values, case.weights * scale, case.index_cache, case.metadata, selected, numerics.TOPK)
    found: dict[str, float] = {
        "whole": case.metadata.rows_selected(numerics.TOPK),
        "rows": int((selected == UNWRITTEN).any(dim=1).sum()),
        "errors": numerics.selection_errors(case, selected),
    }
    packed = unpack_fp8_ds_mla(pack_fp8_ds_mla(case.latent))
    for name, cache, held in (("attention", case.latent_cache, case.latent), ("packed", case.packed_cache, packed)):
        device.store_latent(case.latent[:, :512], case.latent[:, 512:], case.slots, cache)
        rows = cache.as_strided((2 * cache.shape[0] * numerics.BLOCK, cache.shape[2]), (cache.shape[2], 1))
        slots, counts = device.resolve_slots(selected, case.metadata, numerics.BLOCK, 2 * numerics.BLOCK, fresh=True)
        out, _ = device.attend(case.q, rows, slots, counts, numerics._SCALE)
        found[name] = numerics.attention_error(case, held, selected, out)
    return found


if __name__ == "__main__":
    sizes = (numerics.HEADS, numerics.INDEX_HEADS, numerics.TOPK, sum(numerics.MIXED), sum(numerics.CONTEXTS))
    device._scratch[CPU] = device.Scratch(Serving(*sizes, block_size=numerics.BLOCK, packed=False), CPU)
    json.dump([step(queries) for queries in (numerics.MIXED, *numerics.DECODES)], sys.stdout)
