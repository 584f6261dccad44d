"""The commands that carry out a plan, and the vLLM command they come to."""

from __future__ import annotations

import shlex
from math import ceil
from pathlib import Path

from glm5deploy.config import Config
from glm5deploy.glm_dsa.tokenizer import read_vocabulary
from glm5deploy.hardware.gpus import GpuGroup
from glm5deploy.server.command import build_command
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.model_table import ModelTable
from glm5deploy.server.plan import GPUS_OF_A_MACHINE, LayoutPlan
from glm5deploy.server.settings import ServeSettings
from glm5deploy.stages.model_headers import FoundModel
from glm5deploy.stages.serve_plan import served_name

_NOT_NORMAL = (2, 3, 4)  # llama.cpp's token types that become added tokens: unknown, control, user-defined


def planned_commands(
    found: FoundModel,
    group: GpuGroup,
    model: ModelTable,
    plan: LayoutPlan,
    config: Config,
    workdir: Path,
    config_file: Path | None,
) -> dict[str, str]:
    """What to type: the stages before serving (for a repository), serving, and what that hands to vLLM."""
    place = [*(["--config", str(config_file)] if config_file else []), "--workdir", str(workdir)]
    commands = {}
    if found.remote:
        commands["prepare"] = shlex.join(["glm5deploy", "run", found.source, "--until", "install", *place])
    commands["serve"] = shlex.join(["glm5deploy", "serve", *_flags(plan, config), *place])
    settings = _settings(found, group, plan, config, workdir)
    command = build_command(settings, model_facts(found, model), config.serve.weights, launcher=("vllm", "serve"))
    commands["vllm"] = command.shell()
    return commands


def _flags(plan: LayoutPlan, config: Config) -> list[str]:
    serve = config.serve
    flags = []
    if plan.gpus > GPUS_OF_A_MACHINE and not serve.nodes:
        machines = ceil(plan.gpus / GPUS_OF_A_MACHINE)
        flags += ["--nodes", ",".join(f"HOST{number + 1}" for number in range(machines))]
    flags += ["--tp", str(plan.layout.tp)]
    if plan.layout.pp > 1:
        flags += ["--pp", str(plan.layout.pp)]
    if plan.layout.expert_parallel:
        flags.append("--ep")
    for name, value, default in (
        ("--context", serve.context, 0),
        ("--kv-dtype", serve.kv_dtype, "auto"),
        ("--weights", serve.weights, "auto"),
        ("--max-seqs", serve.max_num_seqs, 0),
        ("--mtp", serve.mtp, 0),
    ):
        if value != default:
            flags += [name, str(value)]
    return flags


def _settings(found: FoundModel, group: GpuGroup, plan: LayoutPlan, config: Config, workdir: Path) -> ServeSettings:
    serve = config.serve
    all_reduce = serve.custom_all_reduce == "on" or (
        serve.custom_all_reduce == "auto" and not (group.gpu.pcie_only and plan.layout.tp > 2)
    )
    return ServeSettings(
        model_folder=workdir / "model",
        device="cuda",
        tp=plan.layout.tp,
        pp=plan.layout.pp,
        host=serve.host,
        port=serve.port,
        name=config.serve.name or served_name(found.source.partition(":")[0] if found.remote else ""),
        context=serve.context or None,
        dtype=serve.dtype,
        kv_dtype=serve.kv_dtype,
        attention=config.install.attention,
        reasoning_parser=serve.reasoning_parser,
        tool_parser=serve.tool_parser,
        max_seqs=serve.max_num_seqs or None,
        mtp=serve.mtp,
        expert_parallel=plan.layout.expert_parallel,
        gpu_memory=serve.gpu_memory or None,
        custom_all_reduce=all_reduce,
        ready_timeout=serve.ready_timeout or 600.0,
        extra=serve.extra,
    )


def model_facts(found: FoundModel, model: ModelTable) -> ModelFacts:
    """What the model folder will say, read from the header it is going to be made of."""
    hparams, metadata = model.hparams, found.shards.metadata
    vocabulary = read_vocabulary(metadata, hparams.vocab_size)
    return ModelFacts(
        index_topk=hparams.index_topk,
        context=hparams.context_length,
        heads=hparams.num_heads,
        hidden_size=hparams.hidden_size,
        mtp_layers=hparams.num_nextn,
        special_tokens=frozenset(token for _, token in vocabulary.of_type(*_NOT_NORMAL)),
        weight_files=tuple((Path(header.name), header.file_size) for header in found.shards.headers),
        has_chat_template="tokenizer.chat_template" in metadata,
        index_topk_pattern=model.schedule.pattern,
    )
