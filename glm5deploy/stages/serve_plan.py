"""From configuration, model folder and what install found to the command and the checks that go before it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glm5deploy.checks import Check
from glm5deploy.config import Config
from glm5deploy.errors import DeployError
from glm5deploy.hardware.disk import read_rate
from glm5deploy.server.api_key import ApiKey, find_api_key
from glm5deploy.server.command import ServeCommand, build_command
from glm5deploy.server.model_facts import ModelFacts, read_model_facts
from glm5deploy.server.preflight import check_host
from glm5deploy.server.running import Places
from glm5deploy.server.settings import Device, ServeSettings
from glm5deploy.stages.engine_check import check_engine_versions, check_vllm_arguments
from glm5deploy.stages.gpu_preflight import Machine, gpu_checks, read_machine
from glm5deploy.stages.kernel_table import usable_table

MEMO = "vllm-arguments.json"
_BASE_SECONDS = 600.0  # imports, profiling, compilation and warm-up with cold caches
_SLOWEST_DISK = 50e6  # bytes per second; a sample that reads slower was disturbed
_MEASURED_FROM = 8 * 10**9  # bytes of weights; less is loaded within the base


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Everything a start needs, and nothing started yet."""

    settings: ServeSettings
    command: ServeCommand
    model: ModelFacts
    places: Places
    key: ApiKey | None
    install: Mapping[str, object]
    memo: Path
    machine: Machine | None
    """None on the CPU engine."""
    table_checks: tuple[Check, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks that run on this machine."""
        return self.settings.local_ranks

    def all_checks(self, *, remember: bool) -> list[Check]:
        """Quick ones first, vLLM is asked last; ``remember`` keeps its answer. Raises DeployError with what it says."""
        checks = [
            check_engine_versions(self.install),
            *check_host(self.settings, self.model, self.places.log, self.key),
            *self.table_checks,
        ]
        if self.machine is not None:
            checks += gpu_checks(self.machine, self.ranks)
        if not any(check.level == "fail" for check in checks):
            checks.append(check_vllm_arguments(self.command, self.settings, self.memo, remember=remember))
        return checks


def make_plan(
    workdir: Path, folder: Path, config: Config, install: Mapping[str, object], environment: Mapping[str, str]
) -> ServePlan:
    """Resolve everything; raises DeployError or UsageError before anything is started."""
    model = read_model_facts(folder)
    device = _device(install)
    key = find_api_key(config.serve.api_key_file, environment)
    machine = read_machine(environment) if device == "cuda" else None
    table, table_checks = _kernel_table(config, device, model, install)
    settings = _settings(folder, config, device, model, install, environment, machine, table)
    require_tensor_parallel(model, settings, config.serve.weights)
    command = build_command(settings, model, config.serve.weights, environment=environment)
    memo = workdir / ".glm5deploy" / MEMO
    return ServePlan(settings, command, model, Places.of(workdir), key, install, memo, machine, tuple(table_checks))


def _kernel_table(
    config: Config, device: Device, model: ModelFacts, install: Mapping[str, object]
) -> tuple[Path | None, list[Check]]:
    """Measured launch parameters are for our kernels alone."""
    if device != "cuda" or install.get("attention") == "native":
        return None, []
    return usable_table(install, model.heads // config.serve.tp, config.serve.kv_dtype == "fp8_ds_mla")


def _device(install: Mapping[str, object]) -> Device:
    found = install.get("device")
    kind = str(found.get("type")) if isinstance(found, Mapping) else str(found)
    if kind.startswith("cuda"):
        return "cuda"
    if kind.startswith("cpu"):
        return "cpu"
    raise DeployError(
        f"the install stage found no device that vLLM runs on ({kind})", hint="glm5deploy install --force"
    )


def _settings(
    folder: Path,
    config: Config,
    device: Device,
    model: ModelFacts,
    install: Mapping[str, object],
    environment: Mapping[str, str],
    machine: Machine | None,
    kernel_table: Path | None,
) -> ServeSettings:
    serve = config.serve
    kv_space = environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    return ServeSettings(
        model_folder=folder,
        device=device,
        tp=serve.tp,
        pp=serve.pp,
        machines=len(serve.nodes) or 1,
        host=serve.host,
        port=serve.port,
        name=config.serve.name or served_name(config.model.repo),
        context=serve.context or None,
        dtype=serve.dtype,
        kv_dtype=serve.kv_dtype,
        attention="native" if install.get("attention") == "native" else "triton",
        reasoning_parser=serve.reasoning_parser,
        tool_parser=serve.tool_parser,
        max_seqs=serve.max_num_seqs or None,
        mtp=serve.mtp,
        expert_parallel=serve.ep,
        gpu_memory=serve.gpu_memory or None,
        custom_all_reduce=serve.custom_all_reduce == "on"
        or (serve.custom_all_reduce == "auto" and machine is not None and machine.custom_all_reduce(serve.tp)),
        cpu_kv_gib=int(kv_space) if kv_space.isdigit() and int(kv_space) else 1,
        cpu_cores=tuple(sorted(os.sched_getaffinity(0))),
        kernel_table=kernel_table,
        ready_timeout=serve.ready_timeout or ready_timeout(model),
        stall_seconds=serve.stall_seconds,
        extra=serve.extra,
    )


def ready_timeout(model: ModelFacts) -> float:
    """Seconds a start may take: the base, and twice the time the weights take at the disk's measured rate."""
    if model.weight_bytes < _MEASURED_FROM:
        return _BASE_SECONDS
    largest = max(model.weight_files, key=lambda entry: entry[1])[0]
    return _BASE_SECONDS + 2 * model.weight_bytes / max(read_rate(largest), _SLOWEST_DISK)


def served_name(repo: str) -> str:
    """``unsloth/GLM-5.2-GGUF`` → ``GLM-5.2``; ``glm-5`` where there is no repository."""
    name = re.sub(r"[-_.]?GGUF$", "", repo.rpartition("/")[2], flags=re.IGNORECASE)
    return name if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,127}", name) else "glm-5"


def require_tensor_parallel(model: ModelFacts, settings: ServeSettings, weights: str) -> None:
    """Raise UsageError unless ``tp`` ranks can share the model, from the GGUF headers alone."""
    from glm5deploy.gguf_files.shards import ShardSet
    from glm5deploy.glm_dsa.hparams import read_hparams
    from glm5deploy.glm_dsa.tensor_parallel import require_legal_tensor_parallel

    # Whether the shards belong together was checked when the model folder was built.
    shards = ShardSet.open(model.weight_files[0][0], check_mix=False)
    hparams = read_hparams(shards.metadata, {tensor.name for tensor in shards.tensors})
    dense = weights == "dense" or (weights == "auto" and settings.device == "cpu")
    require_legal_tensor_parallel(
        shards.tensors, hparams, settings.tp, expert_parallel=settings.expert_parallel, dequantised=dense
    )
