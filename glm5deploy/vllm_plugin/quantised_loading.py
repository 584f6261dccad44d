"""Loading with weights kept quantised: what is decided before the model is built, and what fills it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from glm5deploy.errors import DeployError, UsageError
from glm5deploy.glm_dsa.tensor_names import Placement
from glm5deploy.glm_dsa.tensor_parallel import require_legal_tensor_parallel
from glm5deploy.quants.formats import Scales
from glm5deploy.quants.planes import Planes
from glm5deploy.vllm_plugin import DRAFT_ARCHITECTURE, product_warmup
from glm5deploy.vllm_plugin.device_memory import blocks_reused
from glm5deploy.vllm_plugin.loader import draft_placements, main_placements
from glm5deploy.vllm_plugin.model_files import ModelFiles
from glm5deploy.vllm_plugin.quantised_config import METHODS, QuantisedGgufConfig
from glm5deploy.vllm_plugin.quantised_modules import fingerprint, quantised_modules
from glm5deploy.vllm_plugin.rank_reader import Progress, Reader
from glm5deploy.vllm_plugin.slabs import Slab

logger = logging.getLogger("vllm.glm5deploy")


def building(vllm_config: Any, model_config: Any) -> AbstractContextManager[None]:
    """Check the file against the parallel layout; layers built in the returned context keep their weights quantised.

    Raises :class:`UsageError` when a rank would get half a block or activations are float16, naming what works instead,
    and :class:`FileFormatError` for a file that is incomplete or of types that nothing here reads.
    """
    if model_config.dtype == torch.float16:
        # Codes of up to 8 bits are exact in bfloat16; float16 would take a slow path that nothing has been measured on.
        raise UsageError(
            "quantised weights are multiplied in bfloat16, not in float16",
            hint="""Use --dtype bfloat16, or --model-loader-extra-config '{"weights": "dense"}' if memory holds it.""",
        )
    files = ModelFiles.open(Path(model_config.model))
    draft = DRAFT_ARCHITECTURE in (getattr(model_config.hf_config, "architectures", None) or ())
    plan = files.plan(getattr(model_config.hf_config, "index_topk_pattern", None), use_mtp=draft)
    tensors = files.shards.by_name
    parallel = vllm_config.parallel_config
    require_legal_tensor_parallel(
        [tensors[p.name] for p in plan.used],
        files.hparams,
        parallel.tensor_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )
    layers = files.hparams.num_layers
    placements = draft_placements(plan, layers) if draft else main_placements(plan, range(layers))
    modules = quantised_modules(placements, tensors)
    if isinstance(vllm_config.additional_config, dict):
        # Compiled graphs hold the types as constants: vLLM must not take another file's from its cache.
        key = f"glm5_gguf{'_draft' if draft else ''}"
        vllm_config.additional_config = {**vllm_config.additional_config, key: fingerprint(modules)}
    return _configured(vllm_config, QuantisedGgufConfig(modules))


@contextmanager
def _configured(vllm_config: Any, quantisation: QuantisedGgufConfig) -> Iterator[None]:
    """Main and draft model may share one configuration: each is built with its own quantisation and leaves none."""
    before = vllm_config.quant_config
    vllm_config.quant_config = quantisation
    try:
        yield
    finally:
        vllm_config.quant_config = before


def quantised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with a method of ours, by their names in the model."""
    return {name: m for name, m in model.named_modules() if isinstance(getattr(m, "quant_method", None), METHODS)}


def fill(model: nn.Module, rank: int = 0) -> tuple[set[str], set[str]]:
    """Read this rank's part of every quantised layer; returns the parameters filled and the Hugging Face names done.

    Raises :class:`DeployError` when scales are not finite, which a damaged file shows.
    """
    layers = quantised_layers(model)
    slabs: list[Slab] = []
    parameters: set[str] = set()
    for name, layer in layers.items():
        method: Any = layer.quant_method
        slabs += method.slabs(layer)
        parameters |= {f"{name}.{parameter}" for parameter in method.parameters.names}
    if not slabs:
        return set(), set()
    progress = Progress(lambda line: logger.info("glm5_gguf: rank %d: %s", rank, line))
    device = slabs[0].target.low.device
    reader = Reader(device, progress)
    reader.fill(slabs)
    logger.info("glm5_gguf: rank %d: %s", rank, reader.times)
    with blocks_reused(device):
        # One answer for all: each would make the host wait for the device.
        sound = torch.stack([scales_are_finite(slab.target) for slab in slabs]).tolist()
    broken = sorted({slab.source.tensor.name for slab, fine in zip(slabs, sound, strict=True) if not fine})
    if broken:
        raise DeployError(
            f"{len(broken)} tensors have scales that are NaN or infinite: {', '.join(broken)}",
            hint="The file is damaged: `glm5deploy fetch` checks it again.",
        )
    product_warmup.remember(layers.values())
    return parameters, {slab.source.name for slab in slabs}


def scales_are_finite(planes: Planes) -> torch.Tensor:
    """Whether all fp16 scales are numbers, bool [] on the planes' device; planes of dense types are checked as such."""
    if planes.halves is None:
        dense = planes.format.scales is Scales.DENSE
        return torch.isfinite(planes.low).all() if dense else torch.ones((), dtype=torch.bool, device=planes.low.device)
    # The second field of IQ4_XS is packed bits, not a number.
    halves = planes.halves[:, :, :1] if planes.format.scales is Scales.X4 else planes.halves
    return torch.isfinite(halves.view(torch.float16)).all()


def left_over(model: nn.Module, placements: Sequence[Placement], done: set[str]) -> tuple[Placement, ...]:
    """What the stream of dense weights still has to bring: nothing of modules that other pipeline stages have."""
    missing = tuple(name for name, m in model.named_modules() if isinstance(m, PPMissingLayer))
    elsewhere = tuple(f"{name}." for name in missing)
    return tuple(p for p in placements if p.hf_name not in done and not p.hf_name.startswith(elsewhere))
