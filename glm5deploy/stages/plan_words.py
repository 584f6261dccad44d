"""A deployment plan's parts as JSON that a terminal shows as lines and tables. Sizes are bytes, times seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5deploy.config import Config
from glm5deploy.files import free_bytes
from glm5deploy.glm_dsa.memory import sizes_by_role
from glm5deploy.hardware.gpus import GpuGroup
from glm5deploy.server.model_table import ModelTable
from glm5deploy.server.plan import LayoutPlan, Wishes, role_bytes
from glm5deploy.sizes import human_bytes
from glm5deploy.stages.model_headers import FoundModel

_START_SECONDS = 120.0  # imports, profiling, graphs and warm-up with warm caches


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second that transfers are reckoned with."""

    network: float = 110e6
    disk: float = 1.5e9


def model_words(found: FoundModel, model: ModelTable) -> dict[str, Any]:
    h, shards = model.hparams, found.shards
    words: dict[str, Any] = {"source": found.source}
    if found.commit:
        words["commit"] = found.commit
    full = len(model.schedule.full_layers)
    return words | {
        "files": len(shards.headers),
        "bytes": shards.file_bytes,
        "layers": f"{h.num_layers}, {h.num_dense_layers} of them dense"
        + (f", and {h.num_nextn} MTP block" if h.num_nextn else ""),
        "indexers": f"{full} of {h.num_layers} layers (from the {model.schedule.source})",
        "experts": f"{h.num_experts}, {h.num_experts_used} a token, {h.num_shared_experts} shared",
        "longest_context": h.context_length,
    }


def gpu_words(group: GpuGroup, wishes: Wishes) -> dict[str, Any]:
    gpu = group.gpu
    return {
        "count": group.count,
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "vllm_may_use": f"{wishes.memory_share:.0%}",
        "compute_capability": gpu.cc,
        "link": gpu.link,
    }


def layout_words(plan: LayoutPlan) -> dict[str, Any]:
    layout = plan.layout
    return {"tp": layout.tp, "pp": layout.pp, "ep": layout.expert_parallel, "obstacles": list(plan.obstacles)}


def budget_words(plan: LayoutPlan) -> list[dict[str, Any]]:
    return [
        {
            "stage": number,
            "layers": stage.layers,
            "usable_bytes": stage.usable,
            "weights_bytes": stage.weights,
            "activations_bytes": stage.workspace.activations,
            "graphs_bytes": stage.workspace.graphs,
            "runtime_bytes": stage.workspace.runtime,
            "free_for_cache_bytes": stage.free,
        }
        for number, stage in enumerate(plan.stages)
    ]


def role_words(found: FoundModel, model: ModelTable, plan: LayoutPlan, wishes: Wishes) -> list[dict[str, Any]]:
    fullest = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].weights)
    on_gpu = role_bytes(model, plan.layout, fullest, dense=wishes.dense)
    return [
        {
            "role": size.role,
            "file_bytes": size.nbytes,
            "bits_per_weight": round(size.bits_per_weight, 2),
            "types": ", ".join(size.types),
            "fullest_gpu_bytes": on_gpu.get(size.role, 0),
        }
        for size in sizes_by_role(found.shards.tensors, model.hparams)
    ]


def cache_words(model: ModelTable, plan: LayoutPlan, config: Config, wishes: Wishes) -> dict[str, Any]:
    longest = min(plan.tokens, model.hparams.context_length)
    context = config.serve.context or longest
    return {
        "type": wishes.kv_dtype,
        "token_bytes": plan.fullest.token_bytes,
        "tokens": plan.tokens,
        "context": context,
        "sequences_of_that_context": plan.tokens // context if context else 0,
    }


def layout_row(plan: LayoutPlan) -> dict[str, Any]:
    layout = plan.layout
    verdict = "; ".join(plan.obstacles)
    if not verdict and not plan.fits:
        verdict = f"{human_bytes(-plan.fullest.free)} too much on a GPU"
    return {
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.expert_parallel,
        "possible": plan.fits,
        "weights_bytes": max(stage.weights for stage in plan.stages) if plan.stages else None,
        "cache_tokens": plan.tokens if plan.fits else None,
        "because": verdict,
    }


def disk_words(found: FoundModel, workdir: Path) -> dict[str, Any]:
    size = found.shards.file_bytes
    several = len(found.shards.headers) > 1
    fetched = size if found.remote else 0
    return {
        "fetch_bytes": fetched,
        "with_merge_bytes": fetched + (size if several else 0),
        "merge_consume_bytes": fetched + (found.largest_file if several else 0),
        "no_merge_bytes": fetched,
        "free_bytes": free_bytes(workdir),
    }


def time_words(found: FoundModel, rates: Rates) -> dict[str, Any]:
    size = found.shards.file_bytes
    several = len(found.shards.headers) > 1
    return {
        "fetch_seconds": size / rates.network if found.remote else 0.0,
        "merge_seconds": 2 * size / rates.disk if several else 0.0,
        "load_seconds": _START_SECONDS + size / rates.disk,
        "reckoned_with": f"network {rates.network / 1e6:g} MB/s, disk {rates.disk / 1e6:g} MB/s",
    }
