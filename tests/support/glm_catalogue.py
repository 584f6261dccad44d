"""Headers of the real models, written down from published files: metadata and the complete tensor table.

Kept apart from the package's own tables on purpose: names, shapes and types here come from header dumps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from glm5deploy.gguf_files.ggml_types import TYPES_BY_NAME, GgmlType

GLM_5_2_FULL = (0, 1, 2, *range(6, 75, 4))


@dataclass(frozen=True, slots=True)
class CatalogueTensor:
    name: str
    shape: tuple[int, ...]
    type: GgmlType

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return self.type.nbytes(elements)


def real_metadata(version: str = "5.2", **changes: object) -> dict[str, object]:
    """Architecture keys of GLM-5 ("5") or GLM-5.2; ``changes`` by short name, ``None`` removes a key."""
    long_context = version == "5.2"
    keys: dict[str, object] = {
        "block_count": 79,
        "context_length": 1048576 if long_context else 202752,
        "embedding_length": 6144,
        "feed_forward_length": 12288,
        "attention.head_count": 64,
        "attention.head_count_kv": 1,
        "rope.freq_base": 8000000.0 if long_context else 1000000.0,
        "attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
        "expert_count": 256,
        "expert_used_count": 8,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_gating_func": 2,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "leading_dense_block_count": 3,
        "vocab_size": 154880,
        "attention.q_lora_rank": 2048,
        "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "expert_feed_forward_length": 2048,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "rope.dimension_count": 64,
        "nextn_predict_layers": 1,
        "attention.indexer.head_count": 32,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items() if not name.startswith("general__")}
    general = {name.replace("__", "."): value for name, value in changes.items() if name.startswith("general__")}
    metadata = {"general.architecture": "glm-dsa", "general.type": "model"} | general
    metadata |= {f"glm-dsa.{name}": value for name, value in keys.items()}
    return {name: value for name, value in metadata.items() if value is not None}


_NORMS = """
attn_norm.weight 6144
ffn_norm.weight 6144
attn_q_a_norm.weight 2048
attn_kv_a_norm.weight 512
"""
_ATTENTION = """
attn_q_a.weight 6144,2048
attn_q_b.weight 2048,16384
attn_kv_a_mqa.weight 6144,576
attn_k_b.weight 192,512,64
attn_v_b.weight 512,256,64
attn_output.weight 16384,6144
"""
_INDEXER = """
indexer.attn_q_b.weight 2048,4096
indexer.attn_k.weight 6144,128
indexer.k_norm.weight 128
indexer.k_norm.bias 128
indexer.proj.weight 6144,32
"""
_DENSE = """
ffn_gate.weight 6144,12288
ffn_up.weight 6144,12288
ffn_down.weight 12288,6144
"""
_MOE = """
ffn_gate_inp.weight 6144,256
exp_probs_b.bias 256
ffn_gate_exps.weight 6144,2048,256
ffn_up_exps.weight 6144,2048,256
ffn_down_exps.weight 2048,6144,256
ffn_gate_shexp.weight 6144,2048
ffn_up_shexp.weight 6144,2048
ffn_down_shexp.weight 2048,6144
"""
_MTP = """
nextn.eh_proj.weight 12288,6144
nextn.enorm.weight 6144
nextn.hnorm.weight 6144
nextn.shared_head_norm.weight 6144
"""
_GLOBAL = """
token_embd.weight 6144,154880
output_norm.weight 6144
output.weight 6144,154880
"""

# A mix in the manner of a 4-bit "UD" file: what a loader meets, not one particular file.
_TYPES = {
    "token_embd": "Q4_K",
    "output": "Q6_K",
    "attn_q_a": "Q5_K",
    "attn_output": "Q5_K",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q5_K",
    "ffn_gate_shexp": "Q5_K",
    "ffn_up_shexp": "Q5_K",
    "ffn_down_shexp": "Q6_K",
}
_FLOAT = ("norm", "ffn_gate_inp", "exp_probs_b", "indexer.proj", "enorm", "hnorm")


def real_tensors(layout: str = "all", *, types: dict[str, str] | None = None) -> list[CatalogueTensor]:
    """The table of GLM-5.2: ``layout`` "all" (an indexer on every block, 1,809 tensors) or "full" (1,524)."""
    return list(_tensors(layout, _TYPES | (types or {})))


def _tensors(layout: str, types: dict[str, str]) -> Iterator[CatalogueTensor]:
    yield from _parse(_GLOBAL, "", types)
    for layer in range(79):
        text = _NORMS + _ATTENTION
        if layout == "all" or layer in GLM_5_2_FULL or layer == 78:
            text += _INDEXER
        text += _DENSE if layer < 3 else _MOE
        if layer == 78:
            text += _MTP
        yield from _parse(text, f"blk.{layer}.", types)


def _parse(text: str, prefix: str, types: dict[str, str]) -> Iterator[CatalogueTensor]:
    for line in text.split("\n"):
        if line:
            name, shape = line.split(" ")
            stem = name.rsplit(".", 1)[0]
            kind = "F32" if any(part in stem for part in _FLOAT) else types.get(stem, "Q8_0")
            yield CatalogueTensor(prefix + name, tuple(int(n) for n in shape.split(",")), TYPES_BY_NAME[kind])
