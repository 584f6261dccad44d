"""The ``vllm serve`` command that follows from settings and model: a pure value with a reason for every flag."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm5deploy.errors import UsageError
from glm5deploy.glm_dsa.pipeline_parallel import VARIABLE as PARTITION
from glm5deploy.glm_dsa.pipeline_parallel import check_partition, partition_variable
from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings, flag_name

LOAD_FORMAT = "glm5_gguf"
TRITON_BACKEND = "GLM5_TRITON_SPARSE"
REASONING_PARSER = "glm45"
TOOL_PARSER = "glm47"

# Both wheels have this module, and it takes the arguments of `vllm serve` with the model as a flag. The `vllm` script
# of the CPU wheel asks the package metadata for "vllm", which that wheel does not provide, and fails at once.
_SERVER_MODULE = "vllm.entrypoints.launchers.api_server.entry"
_KEPT = "already set in the environment"
# Other spellings under which vLLM knows a flag that is generated here.
_ALIASES = {"-cc": "--compilation-config", "-sc": "--speculative-config", "-pp": "--pipeline-parallel-size"}


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """``argv`` is whole (it begins with ``launcher``), ``env`` only what is added to the caller's environment;
    ``reasons`` holds one for every flag and variable.

    No secret is in it: the API key is handed to the process apart from this value.
    """

    launcher: tuple[str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    reasons: Mapping[str, str]

    @property
    def vllm_arguments(self) -> tuple[str, ...]:
        """What vLLM's own argument parser sees: the model folder and the flags."""
        return self.argv[len(self.launcher) :]

    def shell(self) -> str:
        """One line that can be pasted into a shell."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.argv)])


@dataclass(frozen=True, slots=True)
class _Flag:
    words: tuple[str, ...]
    reason: str


def build_command(
    settings: ServeSettings,
    model: ModelFacts,
    weights: str = "auto",
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] | None = None,
) -> ServeCommand:
    """The command for ``settings``. ``weights`` is "auto", "dense" or "quantised", as the loader knows it.
    ``launcher`` is what precedes the model folder; by default what the installed wheel needs.

    Flags after ``--`` replace generated ones of the same name, and a variable that ``environment`` has already stays as
    it is. Raises UsageError for a combination that cannot work.
    """
    context = settings.context
    if context is not None and context > model.context:
        raise UsageError(f"--context {context}: the model was made for at most {model.context} tokens")
    if not model.has_chat_template and not any(flag_name(word) == "--chat-template" for word in settings.extra):
        raise UsageError(
            "the GGUF file has no chat template, so the server could not answer a chat",
            hint="give one as a file: glm5deploy serve … -- --chat-template FILE",
        )
    if settings.mtp and not model.mtp_layers:
        raise UsageError("--mtp asks for draft tokens, but the GGUF file has no MTP block", hint="leave --mtp out")
    given = {_ALIASES.get(flag, flag) for flag in map(flag_name, settings.extra) if flag}
    reasons: dict[str, str] = {}
    words: list[str] = []
    for flag in _flags(settings, model, weights):
        name = flag.words[0]
        if name in given or name.replace("--no-", "--") in given or f"--no-{name[2:]}" in given:
            reasons[name] = "replaced by what stands after --"
            continue
        words += flag.words
        reasons[name] = flag.reason
    variables = _variables(settings, model)
    check_partition((environment or {}).get(PARTITION), model.index_topk_pattern, settings.pp)
    present = variables.keys() & (environment or {}).keys()
    reasons.update({name: _KEPT if name in present else reason for name, (_, reason) in variables.items()})
    prefix = tuple(vllm_launcher() if launcher is None else launcher)
    return ServeCommand(
        launcher=prefix,
        argv=(*prefix, str(settings.model_folder), *words, *settings.extra),
        env={name: value for name, (value, _) in variables.items() if name not in present},
        reasons=reasons,
    )


def vllm_launcher() -> tuple[str, ...]:
    """How this interpreter's vLLM is started as a server; the model folder comes next."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return (sys.executable, "-m", _SERVER_MODULE, "--model")
    return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")


def _flags(settings: ServeSettings, model: ModelFacts, weights: str) -> list[_Flag]:
    flags = [
        _Flag(("--load-format", LOAD_FORMAT), "weights come from the GGUF files that the model folder names"),
        _Flag(("--served-model-name", settings.name), "the name clients ask for"),
        _Flag(("--host", settings.host), "the address to listen on"),
        _Flag(("--port", str(settings.port)), "the port to listen on"),
        _Flag(("--tensor-parallel-size", str(settings.tp)), "ranks that share every layer"),
        _Flag(("--dtype", settings.dtype), "type of the activations"),
        _Flag(("--kv-cache-dtype", settings.kv_dtype), "type of the latent cache"),
        _Flag(
            ("--max-model-len", "auto" if settings.context is None else str(settings.context)),
            "prompt and answer together, in tokens",
        ),
    ]
    if weights != "auto":
        extra = json.dumps({"weights": weights})
        flags.append(_Flag(("--model-loader-extra-config", extra), "how weights are kept in memory"))
    if settings.attention == "triton":
        flags.append(_Flag(("--attention-backend", TRITON_BACKEND), "sparse attention on every supported GPU"))
    if settings.pp > 1:
        flags.append(_Flag(("--pipeline-parallel-size", str(settings.pp)), "groups of layers one after the other"))
    if settings.expert_parallel:
        flags.append(_Flag(("--enable-expert-parallel",), "whole experts are spread over the ranks"))
    if settings.max_seqs is not None:
        flags.append(_Flag(("--max-num-seqs", str(settings.max_seqs)), "sequences that run at the same time"))
    if settings.mtp:
        draft = json.dumps({"method": "mtp", "num_speculative_tokens": settings.mtp})
        flags.append(_Flag(("--speculative-config", draft), "the model's own MTP block proposes tokens"))
    flags += _parsers(settings, model)
    flags += _cpu_flags() if settings.device == "cpu" else _gpu_flags(settings)
    return flags


def _parsers(settings: ServeSettings, model: ModelFacts) -> list[_Flag]:
    """A parser whose marker tokens the tokenizer lacks makes vLLM stop, so "auto" looks at the tokenizer."""
    reasoning, tool = settings.reasoning_parser, settings.tool_parser
    if reasoning == "auto":
        reasoning = REASONING_PARSER if {"<think>", "</think>"} <= model.special_tokens else "none"
    if tool == "auto":
        tool = TOOL_PARSER if {"<tool_call>", "</tool_call>"} <= model.special_tokens else "none"
    flags = []
    if reasoning != "none":
        flags.append(_Flag(("--reasoning-parser", reasoning), "separates thinking from the answer"))
    if tool != "none":
        flags.append(_Flag(("--tool-call-parser", tool), "turns the model's tool calls into the API's"))
        flags.append(_Flag(("--enable-auto-tool-choice",), "the model decides whether to call a tool"))
    return flags


def _cpu_flags() -> list[_Flag]:
    custom_ops = json.dumps({"custom_ops": ["none"]})
    return [
        _Flag(("--enforce-eager",), "nothing is compiled on the CPU, the start is shorter"),
        _Flag(("--compilation-config", custom_ops), "the CPU's own RoPE operator corrupts 3-D queries in eager mode"),
    ]


def _gpu_flags(settings: ServeSettings) -> list[_Flag]:
    flags = []
    if settings.gpu_memory is not None:
        flags.append(_Flag(("--gpu-memory-utilization", f"{settings.gpu_memory:g}"), "share of each GPU's memory"))
    if not settings.custom_all_reduce:
        flags.append(_Flag(("--disable-custom-all-reduce",), "it hangs or corrupts on more than two PCIe GPUs"))
    if settings.max_seqs is not None:
        sizes = {"cudagraph_capture_sizes": graph_sizes(settings.max_seqs, settings.mtp)}
        flags.append(
            _Flag(("--compilation-config", json.dumps(sizes)), "one CUDA graph a batch size: sequences × (1 + drafts)")
        )
    return flags


def graph_sizes(max_seqs: int, mtp: int) -> list[int]:
    """Batch sizes in tokens to capture: 1, 2, 4, then every eighth sequence (every 32nd past 64), × (1 + drafts)."""
    counts = {1, 2, 4, *range(8, min(max_seqs, 64) + 1, 8), *range(96, max_seqs + 1, 32), max_seqs}
    return [count * (1 + mtp) for count in sorted(counts) if count <= max_seqs]


def _variables(settings: ServeSettings, model: ModelFacts) -> dict[str, tuple[str, str]]:
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
