"""Load format ``glm5_gguf``: the weights of a model folder, straight from its merged GGUF file or its shards."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from glm5deploy.errors import DeployError
from glm5deploy.glm_dsa.tensor_names import Placement, TensorPlan
from glm5deploy.vllm_plugin import LOAD_FORMAT, cpu

logger = logging.getLogger("vllm.glm5deploy")

WEIGHTS = ("auto", "dense", "quantised")  # auto: quantised on a GPU, dense on a CPU


class Glm5GgufLoader(BaseModelLoader):
    """Streams tensors into the model and refuses to end with anything missing, left over or not a number."""

    expert_parallel = False
    quantised = False

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config or {}
        unknown = sorted(set(extra) - {"weights"})
        if unknown:
            raise ValueError(f"load format {LOAD_FORMAT} knows no --model-loader-extra-config {', '.join(unknown)}")
        self.weights = extra.get("weights", "auto")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights {self.weights!r}: say one of {', '.join(WEIGHTS)}")

    def download_model(self, model_config: Any) -> None:
        """The files are local; their list and headers are checked."""
        from glm5deploy.vllm_plugin.model_files import ModelFiles

        ModelFiles.open(Path(model_config.model))

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        self.expert_parallel = vllm_config.parallel_config.enable_expert_parallel
        self.quantised = self.weights == "quantised" or (self.weights == "auto" and not cpu.is_cpu())
        with ExitStack() as stack:
            if self.quantised:
                from glm5deploy.vllm_plugin import quantised_loading

                stack.enter_context(quantised_loading.building(vllm_config, model_config))
            return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill ``model``; :class:`DeployError` names every parameter that stayed unset or holds NaN or infinity."""
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        from glm5deploy.vllm_plugin.model_files import ModelFiles
        from glm5deploy.vllm_plugin.weights import Rank, stream

        files = ModelFiles.open(Path(model_config.model))
        draft = hasattr(model.model, "mtp_start_layer_idx")
        plan = files.plan(getattr(model_config.hf_config, "index_topk_pattern", None), use_mtp=draft)
        rank = Rank(get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), self.expert_parallel)
        if draft:
            here = draft_placements(plan, files.hparams.num_layers)
        else:
            here = main_placements(plan, range(model.model.start_layer, model.model.end_layer))
        filled: set[str] = set()
        if self.quantised:
            from glm5deploy.vllm_plugin import quantised_loading

            filled, done = quantised_loading.fill(model, rank.index)
            here = quantised_loading.left_over(model, here, done)
        loaded = filled | model.load_weights(stream(here, files.shards.by_name, model_config.dtype, rank))
        require_complete(model, loaded)
        logger.info(
            "glm5_gguf: %d dense tensors of %d files, %d parameters in all (%d quantised), %d tensors left out, "
            "indexer schedule %s",
            len(here),
            len(files.shards.paths),
            len(loaded),
            len(filled),
            len(plan.dropped),
            files.pattern,
        )


def main_placements(plan: TensorPlan, layers: range) -> tuple[Placement, ...]:
    """What a pipeline stage with ``layers`` loads; a tied embedding is its own output matrix too."""
    here = tuple(p for p in plan.used if p.layer is None or p.layer in layers)
    if plan.tied_embeddings:
        here += tuple(replace(p, hf_name="lm_head.weight") for p in here if p.name == "token_embd.weight")
    return here


def draft_placements(plan: TensorPlan, num_layers: int) -> tuple[Placement, ...]:
    """What the MTP draft model loads: the MTP blocks, and the main model's embedding and head where it has none."""
    blocks = tuple(p for p in plan.used if p.layer is not None and p.layer >= num_layers)
    names = {p.hf_name for p in blocks}
    shared = (
        ("token_embd.weight", f"model.layers.{num_layers}.embed_tokens.weight"),
        (
            "token_embd.weight" if plan.tied_embeddings else "output.weight",
            f"model.layers.{num_layers}.shared_head.head.weight",
        ),
    )
    by_name = {p.name: p for p in plan.used}
    return blocks + tuple(replace(by_name[name], hf_name=target) for name, target in shared if target not in names)


def require_complete(model: nn.Module, loaded: set[str]) -> None:
    """Every parameter was loaded and is finite, or :class:`DeployError` names those that are not."""
    parameters = dict(model.named_parameters())
    unset = sorted(parameters.keys() - loaded)
    if unset:
        raise DeployError(f"{len(unset)} model parameters got no weights: {', '.join(unset)}")
    broken = sorted(name for name, p in parameters.items() if not _finite(p.data))
    if broken:
        raise DeployError(
            f"{len(broken)} model parameters hold NaN or infinity after loading: {', '.join(broken)}",
            hint="The file is damaged, or this vLLM cuts weights for its ranks in a way this loader does not know.",
        )


def _finite(values: torch.Tensor) -> bool:
    if not values.is_floating_point():
        return True
    flat = values.flatten()
    return all(bool(torch.isfinite(part).all()) for part in flat.split(1 << 26))
