"""Which part of a step a GPU kernel belongs to, by its name."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import glm5deploy

LINEAR = "GGML linear"
MOE = "routed experts"
FITS = "activations in fp16"
ATTENTION = "sparse MLA"
LOGITS = "indexer logits"
TOPK = "top-k selection"
CACHES = "caches, slots, index query"
ROUTER = "router"
GEMM = "dense gemms"
SAMPLER = "sampler, step input"
SMALL = "norms, RoPE, elementwise"
COPY = "copies, fills"
OTHER = "other"

# Our kernels by the file that defines them; files that are not named here show as themselves.
_FILES = {
    "linear_kernel": LINEAR,
    "unpack": LINEAR,
    "integer_linear": LINEAR,
    "moe_kernel": MOE,
    "one_token_kernel": MOE,
    "integer_moe": MOE,
    "activations": FITS,
    "sparse_mla": ATTENTION,
    "sparse_mla_hopper": ATTENTION,
    "indexer_logits": LOGITS,
    "topk": TOPK,
    "topk_block": TOPK,
    "topk_device": TOPK,
    "topk_stream": TOPK,
    "topk_steps": TOPK,
    "topk_steps_device": TOPK,
    "index_cache": CACHES,
    "latent_cache": CACHES,
    "latent_input": SMALL,
    "query_input": GEMM,
    "value_output": GEMM,
    "index_input": CACHES,
    "slots": CACHES,
    "step_tokens": CACHES,
    "add_norm": SMALL,
    "row_product": GEMM,
}
# Everybody else's, first match counts.
_PATTERNS = (
    (
        ROUTER,
        r"LLFp32|fp32w|grouped_topk|single_group_topk|topk_?sigmoid|topkGating|topk_softmax|moe_.*topk|fused_topk|router",
    ),
    (
        SAMPLER,
        r"gumbel|sample|top_?p|softmax|argmax|min_p|penalt|logit|exponential|prepare_|_input|seq_lens|block_table",
    ),
    (GEMM, r"gemm|nvjet|cutlass|cublas|xmma|splitK|gemv|dot_kernel|mma_"),
    (
        SMALL,
        r"norm|rope|rotary|silu|act_and_mul|elementwise|reduce|triton_(poi|red|per)|cat|index|gather|scatter|arange",
    ),
    (COPY, r"memcpy|memset|copy|fill"),
)


@lru_cache(maxsize=1)
def own_kernels() -> dict[str, str]:
    """Our Triton kernels' names and their groups, read off the package's source."""
    found = {}
    root = Path(glm5deploy.__file__).parent
    for file in sorted([*root.glob("kernels/*.py"), *root.glob("quants/*.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
                found[node.name] = _FILES.get(file.stem, f"ours: {file.stem}")
    return found


def group_of(name: str) -> str:
    """The group of a kernel with this name (a Triton function's, or a demangled C++ name)."""
    own = own_kernels().get(name)
    if own is not None:
        return own
    for group, pattern in _PATTERNS:
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return OTHER
