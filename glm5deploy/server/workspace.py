"""What a GPU holds besides weights and cache: an estimate, made of formulas where sizes follow from the model.

Sizes of buffers follow from the largest batch; what driver, libraries and graphs take are round figures from starts of
models of this size, and an engine measures its own before it allocates the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm5deploy.glm_dsa.hparams import Hparams
from glm5deploy.glm_dsa.memory import ParallelLayout

_GIB = 1 << 30
_RUNTIME = int(0.7 * _GIB)  # CUDA context and loaded kernels
_COMMUNICATION = int(0.7 * _GIB)  # NCCL's buffers, all-reduce workspaces
_GRAPHS = int(1.2 * _GIB)
_INDEXER_LOGITS = 512 << 20  # vLLM's bound, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes on one GPU."""

    runtime: int
    graphs: int
    activations: int

    @property
    def total(self) -> int:
        return self.runtime + self.graphs + self.activations


def batch_defaults(memory_bytes: int, cc: str, name: str) -> tuple[int, int]:
    """(tokens, sequences) of the largest batch that vLLM 0.33's server takes by default on a GPU of this size."""
    if memory_bytes >= 160 * _GIB:
        return 16384, 1024
    if memory_bytes >= 70 * _GIB and "a100" not in name.lower() and cc != "12.1":
        return 8192, 1024
    return 2048, 256


def workspace(hparams: Hparams, layout: ParallelLayout, batch_tokens: int, max_seqs: int) -> Workspace:
    """The estimate for a rank of ``layout``."""
    several = layout.tp * layout.pp > 1
    return Workspace(
        runtime=_RUNTIME + (_COMMUNICATION if several else 0),
        graphs=_GRAPHS,
        activations=activation_bytes(hparams, layout, batch_tokens, max_seqs),
    )


def activation_bytes(h: Hparams, layout: ParallelLayout, tokens: int, seqs: int) -> int:
    """Peak of a profiling run over ``tokens`` tokens: what one layer holds at once, and the logits of ``seqs`` rows."""
    heads = h.num_heads // layout.tp
    residual = 4 * 2 * h.hidden_size
    attention = 2 * heads * (h.qk_head_dim + h.latent_dim + h.kv_lora_rank + h.v_head_dim)
    width = h.moe_intermediate_size // (1 if layout.expert_parallel else layout.tp)
    routed = 2 * h.num_experts_used * (h.hidden_size + 3 * width)
    indexer = 3 * h.index_num_heads * h.index_head_dim
    selected = 2 * 4 * h.index_topk  # positions, and the cache rows they stand for
    # Attention and experts follow each other and use the same memory.
    token = residual + selected + max(attention + indexer, routed)
    logits = 2 * 4 * seqs * h.vocab_size
    return tokens * token + _INDEXER_LOGITS + logits
