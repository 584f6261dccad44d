"""Everything that a GPU's kernels need before serving: measured parameters looked at, every variant prepared."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch

from glm5deploy.kernels.compile_counter import Prepared, serving_begins, watch
from glm5deploy.kernels.prepare import prepare
from glm5deploy.kernels.tuning import TABLE_VARIABLE, gpu, measured
from glm5deploy.kernels.warmup import Serving, launches
from glm5deploy.vllm_plugin import experts_warmup, product_warmup

logger = logging.getLogger("vllm.glm5deploy")
_SECONDS_BETWEEN_LINES = 5.0


def begin(device: torch.device) -> None:
    """Watch what is compiled from here on, and say which launch parameters hold; called before the first launch."""
    watch()
    path = os.environ.get(TABLE_VARIABLE)
    if not path:
        return
    table = measured(gpu(device))
    if table.refused:
        logger.warning("the launch parameters in %s are not used: %s", path, table.refused)
    else:
        logger.info("launch parameters from %s: %d rows measured for %s", path, len(table.rows), dict(table.request))


def warm_up(serving: Serving, device: torch.device) -> None:
    """Compile, or load from the cache on disk, every variant of every kernel; whatever comes later is warned of."""
    engine = serving.max_tokens, serving.dtype
    # What takes longest to compile goes first, or threads would wait for it at the end.
    wanted = [*experts_warmup.launches(engine[1]), *product_warmup.launches(*engine), *launches(serving, device)]
    parallel = torch.distributed.is_initialized()
    rank, ranks = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if parallel else (0, 1)
    start = time.monotonic()
    found = prepare(wanted, device, rank, ranks, _say_progress())
    compiled = sum(not variant.cached for variant in found)
    logger.info(
        "%d kernel variants prepared before serving in %.1f s: %d compiled, %d loaded",
        len(found),
        time.monotonic() - start,
        compiled,
        len(found) - compiled,
    )
    serving_begins(_warn)


def _say_progress() -> Callable[[int, int], None]:
    """Logs how far warm-up is, every few seconds."""
    last = time.monotonic()

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            logger.info("preparing kernels: %d of %d launches", done, total)

    return told


def _warn(variant: Prepared) -> None:
    how = "loaded from the cache" if variant.cached else "compiled"
    logger.warning("kernel %s was %s after warm-up, which slows down a step: %s", variant.kernel, how, variant.variant)
