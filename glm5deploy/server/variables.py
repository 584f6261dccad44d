"""The environment variables of ``vllm serve`` that are generated, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.pipeline_parallel import VARIABLE as PARTITION
from glm5deploy.glm_dsa.pipeline_parallel import partition_variable
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings

TABLE_VARIABLE = "GLM5DEPLOY_KERNEL_TABLE"
TABLE_REASON = "launch parameters that were measured on this GPU"


def generated_variables(settings: ServeSettings, model: ModelFacts) -> dict[str, tuple[str, str]]:
    """Value and reason by name. Raises UsageError when there are too few cores or indexers for the ranks."""
    timeout = str(max(1, round(settings.ready_timeout)))
    variables = {
        "VLLM_ENGINE_READY_TIMEOUT_S": (timeout, "vLLM gives up loading after this many seconds"),
        "HF_HUB_OFFLINE": ("1", "everything is in the model folder; nothing is looked up on the network"),
        "VLLM_NO_USAGE_STATS": ("1", "nothing is reported to anyone"),
    }
    if settings.pp > 1 and model.index_topk_pattern:
        partition = partition_variable(model.index_topk_pattern, settings.pp)
        if partition is not None:
            variables[PARTITION] = (partition, "a stage must begin with a layer that has its own indexer")
    if settings.cache_dir is not None:
        for name, folder in (("VLLM_CACHE_ROOT", "vllm"), ("TRITON_CACHE_DIR", "triton")):
            variables[name] = (str(settings.cache_dir / folder), "compiled code is kept for the next start")
    if settings.kernel_table is not None:
        variables[TABLE_VARIABLE] = (str(settings.kernel_table), TABLE_REASON)
    if settings.device == "cuda":
        variables["VLLM_USE_FLASHINFER_SAMPLER"] = ("0", "its first use compiles for two minutes")
        return variables
    variables["VLLM_CPU_KVCACHE_SPACE"] = (str(settings.cpu_kv_gib), "GiB a rank for the KV cache")
    if settings.local_ranks > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = (
            cpu_binding(settings.cpu_cores, settings.local_ranks),
            "cores of each rank; without it vLLM wants a NUMA node for each",
        )
    return variables


def cpu_binding(cores: Sequence[int], tp: int) -> str:
    """``cores`` in ``tp`` equal groups, "0,1|2,3"; the remainder stays free. Raises UsageError for too few cores."""
    each = len(cores) // tp
    if not each:
        raise UsageError(
            f"--tp {tp} on the CPU engine needs a core for each rank, this process may use {len(cores)}",
            hint=f"--tp {max(1, len(cores))}",
        )
    groups = [cores[rank * each : (rank + 1) * each] for rank in range(tp)]
    return "|".join(",".join(map(str, group)) for group in groups)
