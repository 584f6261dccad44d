"""The few of vLLM's Prometheus metrics that a benchmark looks at."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"^(?P<name>vllm:[a-z0-9_:]+)(?:\{(?P<labels>.*)\})? (?P<value>[-+0-9.eEnaif]+)$", re.MULTILINE)
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """``kv_tokens`` is the KV cache's size in tokens of one sequence's layers (None: the server does not say).

    ``drafted`` and ``accepted`` count tokens of speculative decoding since the start.
    """

    preemptions: int
    drafted: int
    accepted: int
    kv_tokens: int | None

    def accepted_since(self, before: ServerCounters) -> float | None:
        """Share of the draft tokens proposed since ``before`` that were accepted; None when there were none."""
        drafted = self.drafted - before.drafted
        return (self.accepted - before.accepted) / drafted if drafted > 0 else None


def read_counters(text: str) -> ServerCounters:
    """Sums over all engines of the metrics in Prometheus' text format; what is absent counts as 0."""
    sums: dict[str, float] = {}
    kv_tokens: int | None = None
    for sample in _SAMPLE.finditer(text):
        name = sample["name"]
        if name == "vllm:cache_config_info":
            labels = dict(_LABEL.findall(sample["labels"] or ""))
            blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
            if blocks.isdigit() and size.isdigit():
                kv_tokens = (kv_tokens or 0) + int(blocks) * int(size)
            continue
        try:
            sums[name] = sums.get(name, 0.0) + float(sample["value"])
        except ValueError:
            continue
    return ServerCounters(
        preemptions=int(sums.get("vllm:num_preemptions_total", 0)),
        drafted=int(sums.get("vllm:spec_decode_num_draft_tokens_total", 0)),
        accepted=int(sums.get("vllm:spec_decode_num_accepted_tokens_total", 0)),
        kv_tokens=kv_tokens,
    )
