"""The flags of ``vllm serve`` that are generated, each with its reason."""

from __future__ import annotations

import json
from dataclasses import dataclass

from glm5deploy.server.model_facts import ModelFacts
from glm5deploy.server.settings import ServeSettings

LOAD_FORMAT = "glm5_gguf"
TRITON_BACKEND = "GLM5_TRITON_SPARSE"
REASONING_PARSER = "glm45"
TOOL_PARSER = "glm47"


@dataclass(frozen=True, slots=True)
class Flag:
    """``words``: the flag's name and, where it takes one, its value."""

    words: tuple[str, ...]
    reason: str


def generated_flags(settings: ServeSettings, model: ModelFacts, weights: str) -> list[Flag]:
    """Everything but the model folder, in the order of the command line."""
    flags = [
        Flag(("--load-format", LOAD_FORMAT), "weights come from the GGUF files that the model folder names"),
        Flag(("--served-model-name", settings.name), "the name clients ask for"),
        Flag(("--host", settings.host), "the address to listen on"),
        Flag(("--port", str(settings.port)), "the port to listen on"),
        Flag(("--tensor-parallel-size", str(settings.tp)), "ranks that share every layer"),
        Flag(("--dtype", settings.dtype), "type of the activations"),
        Flag(("--kv-cache-dtype", settings.kv_dtype), "type of the latent cache"),
        Flag(
            ("--max-model-len", "auto" if settings.context is None else str(settings.context)),
            "prompt and answer together, in tokens",
        ),
    ]
    if weights != "auto":
        extra = json.dumps({"weights": weights})
        flags.append(Flag(("--model-loader-extra-config", extra), "how weights are kept in memory"))
    if settings.attention == "triton":
        flags.append(Flag(("--attention-backend", TRITON_BACKEND), "sparse attention on every supported GPU"))
    if settings.pp > 1:
        flags.append(Flag(("--pipeline-parallel-size", str(settings.pp)), "groups of layers one after the other"))
    if settings.expert_parallel:
        flags.append(Flag(("--enable-expert-parallel",), "whole experts are spread over the ranks"))
    if settings.max_seqs is not None:
        flags.append(Flag(("--max-num-seqs", str(settings.max_seqs)), "sequences that run at the same time"))
    if settings.mtp:
        draft = json.dumps({"method": "mtp", "num_speculative_tokens": settings.mtp})
        flags.append(Flag(("--speculative-config", draft), "the model's own MTP block proposes tokens"))
    flags += _parsers(settings, model)
    flags += _cpu_flags() if settings.device == "cpu" else _gpu_flags(settings)
    return flags


def _parsers(settings: ServeSettings, model: ModelFacts) -> list[Flag]:
    """A parser whose marker tokens the tokenizer lacks makes vLLM stop, so "auto" looks at the tokenizer."""
    reasoning, tool = settings.reasoning_parser, settings.tool_parser
    if reasoning == "auto":
        reasoning = REASONING_PARSER if {"<think>", "</think>"} <= model.special_tokens else "none"
    if tool == "auto":
        tool = TOOL_PARSER if {"<tool_call>", "</tool_call>"} <= model.special_tokens else "none"
    flags = []
    if reasoning != "none":
        flags.append(Flag(("--reasoning-parser", reasoning), "separates thinking from the answer"))
    if tool != "none":
        flags.append(Flag(("--tool-call-parser", tool), "turns the model's tool calls into the API's"))
        flags.append(Flag(("--enable-auto-tool-choice",), "the model decides whether to call a tool"))
    return flags


def _cpu_flags() -> list[Flag]:
    custom_ops = json.dumps({"custom_ops": ["none"]})
    return [
        Flag(("--enforce-eager",), "nothing is compiled on the CPU, the start is shorter"),
        Flag(("--compilation-config", custom_ops), "the CPU's own RoPE operator corrupts 3-D queries in eager mode"),
    ]


def _gpu_flags(settings: ServeSettings) -> list[Flag]:
    flags = []
    if settings.gpu_memory is not None:
        flags.append(Flag(("--gpu-memory-utilization", f"{settings.gpu_memory:g}"), "share of each GPU's memory"))
    if not settings.custom_all_reduce:
        flags.append(Flag(("--disable-custom-all-reduce",), "it hangs or corrupts on more than two PCIe GPUs"))
    if settings.max_seqs is not None:
        sizes = {"cudagraph_capture_sizes": graph_sizes(settings.max_seqs, settings.mtp)}
        flags.append(
            Flag(("--compilation-config", json.dumps(sizes)), "one CUDA graph a batch size: sequences × (1 + drafts)")
        )
    return flags


def graph_sizes(max_seqs: int, mtp: int) -> list[int]:
    """Batch sizes in tokens to capture: 1, 2, 4, then every eighth sequence (every 32nd past 64), × (1 + drafts)."""
    counts = {1, 2, 4, *range(8, min(max_seqs, 64) + 1, 8), *range(96, max_seqs + 1, 32), max_seqs}
    return [count * (1 + mtp) for count in sorted(counts) if count <= max_seqs]
