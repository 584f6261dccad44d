"""plan: what a model would need and give on certain GPUs, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from glm5deploy.config import Config
from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.indexer_schedule import resolve_schedule
from glm5deploy.glm_dsa.memory import ParallelLayout
from glm5deploy.glm_dsa.tensor_names import plan_tensors
from glm5deploy.glm_dsa.weight_types import require_readable
from glm5deploy.hardware.gpus import SUPPORTED_CC, GpuGroup
from glm5deploy.server.model_table import ModelTable, candidate_layouts
from glm5deploy.server.plan import (
    VLLM_MEMORY_SHARE,
    LayoutPlan,
    Wishes,
    best_layout,
    decode_limit,
    plan_layout,
)
from glm5deploy.sizes import human_bytes
from glm5deploy.stages import plan_words as words
from glm5deploy.stages.model_headers import FoundModel
from glm5deploy.stages.plan_words import Rates
from glm5deploy.stages.planned_command import planned_commands

_MOST_GPUS = 64


def make_model_table(found: FoundModel, config: Config) -> ModelTable:
    """Read the model out of its headers; raises FileFormatError, DeployError or UsageError as loading it would."""
    shards = found.shards
    hparams = read_hparams(shards.metadata, shards.by_name)
    schedule = resolve_schedule(hparams, shards.by_name, override=config.patch.indexer_schedule or None)
    plan = plan_tensors(shards.tensors, hparams, schedule, use_mtp=config.serve.mtp > 0)
    require_readable(shards.by_name[placement.name] for placement in plan.used)
    return ModelTable(hparams, schedule, plan, shards.by_name)


def make_deployment_plan(
    found: FoundModel, group: GpuGroup, config: Config, workdir: Path, rates: Rates, config_file: Path | None = None
) -> dict[str, Any]:
    """The whole plan as a JSON object. ``fits`` is its verdict; sizes are bytes, times seconds.

    ``config_file`` is the file that ``config`` came from, for the commands to name it.
    """
    model = make_model_table(found, config)
    context = config.serve.context
    if context > model.hparams.context_length:
        raise UsageError(f"--context {context}: the model was made for at most {model.hparams.context_length} tokens")
    wishes = _wishes(config)
    plans = [plan_layout(model, group.gpu, layout, wishes) for layout in candidate_layouts(group.count)]
    asked = _asked_layout(config)
    chosen = plan_layout(model, group.gpu, asked, wishes) if asked else best_layout(plans, context)
    nearest = chosen or min(plans, key=lambda p: (bool(p.obstacles), -p.fullest.free if p.stages else 0))
    value: dict[str, Any] = {
        "fits": chosen is not None and chosen.fits and chosen.gpus <= group.count and chosen.tokens >= max(context, 1),
        "model": words.model_words(found, model),
        "gpus": words.gpu_words(group, wishes),
        "layout": words.layout_words(nearest),
    }
    if nearest.stages:
        value["per_gpu"] = words.budget_words(nearest)
        value["weights"] = words.role_words(found, model, nearest, wishes)
        value["cache"] = words.cache_words(model, nearest, config, wishes)
    value["layouts"] = [words.layout_row(plan) for plan in plans]
    value["disk"] = words.disk_words(found, workdir)
    value["times"] = words.time_words(found, rates)
    limit = decode_limit(model, group.gpu, nearest.layout)
    if nearest.stages and limit is not None:
        value["decode_limit"] = {
            "tokens_per_second": round(limit, 1),
            "means": "one sequence, if reading the weights from memory took all the time; an upper bound",
        }
    value["notes"] = _notes(found, model, group, nearest, config, wishes, workdir)
    if value["fits"]:
        value["commands"] = planned_commands(found, group, model, nearest, config, workdir, config_file)
    return value


def _wishes(config: Config) -> Wishes:
    serve = config.serve
    return Wishes(
        kv_dtype="fp8_ds_mla" if serve.kv_dtype == "fp8_ds_mla" else "bfloat16",
        use_mtp=serve.mtp > 0,
        dense=serve.weights == "dense",
        memory_share=serve.gpu_memory or VLLM_MEMORY_SHARE,
        max_seqs=serve.max_num_seqs,
    )


def _asked_layout(config: Config) -> ParallelLayout | None:
    """The layout of the settings, when any of its sizes was set; a size left out is 1."""
    named = any(config.origin(f"serve.{key}") != "default" for key in ("tp", "pp", "ep"))
    return ParallelLayout(config.serve.tp, config.serve.pp, config.serve.ep) if named else None


def _notes(
    found: FoundModel,
    model: ModelTable,
    group: GpuGroup,
    plan: LayoutPlan,
    config: Config,
    wishes: Wishes,
    workdir: Path,
) -> list[str]:
    notes = []
    if plan.gpus > group.count:
        notes.append(f"TP {plan.layout.tp} × PP {plan.layout.pp} wants {plan.gpus} GPUs, there are {group.count}")
    elif plan.gpus < group.count:
        notes.append(f"{group.count - plan.gpus} of {group.count} GPUs stay idle")
    if plan.fits and plan.tokens < config.serve.context:
        notes.append(f"the cache holds {plan.tokens} tokens, fewer than the context of {config.serve.context}")
    if plan.stages and not plan.fits:
        fewest = fewest_gpus(model, group, wishes)
        notes.append(
            f"weights and work space take {human_bytes(plan.fullest.usable - plan.fullest.free)} of "
            f"{human_bytes(plan.fullest.usable)} on a GPU; "
            + (f"{fewest} of these GPUs would do" if fewest else f"not even {_MOST_GPUS} of these GPUs would do")
        )
    disk = words.disk_words(found, workdir)
    if disk["with_merge_bytes"] > disk["free_bytes"]:
        notes.append(
            f"{workdir} has {human_bytes(disk['free_bytes'])} free: "
            + (
                "merge with --consume, or serve the shards unmerged with --no-merge"
                if disk["no_merge_bytes"] <= disk["free_bytes"]
                else f"too little for {human_bytes(disk['no_merge_bytes'])} of shards; choose another --workdir"
            )
        )
    if group.gpu.cc not in SUPPORTED_CC:
        notes.append(f"compute capability {group.gpu.cc} is none that the sparse backend is made for")
    if group.gpu.link is not None and group.gpu.pcie_only and plan.layout.tp > 2:
        notes.append("more than two GPUs over PCIe: vLLM's own all-reduce is switched off, NCCL does the work")
    if model.schedule.warning:
        notes.append(model.schedule.warning)
    return notes


def fewest_gpus(model: ModelTable, group: GpuGroup, wishes: Wishes) -> int | None:
    """The smallest number of such GPUs, up to 64, on which some layout fits."""
    for count in range(group.count, _MOST_GPUS + 1):
        plans = (plan_layout(model, group.gpu, layout, wishes) for layout in candidate_layouts(count))
        if any(plan.fits for plan in plans):
            return count
    return None
