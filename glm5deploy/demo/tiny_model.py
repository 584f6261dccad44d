"""A tiny ``glm-dsa`` model as a split GGUF set: random weights behind the real architecture's every part.

Head shapes are GLM-5's (192 + 64, values 256, latent 512), the indexer selects 64 tokens on every second layer, and
the types are mixed in the manner of a published 4-bit file, so that fetching, merging, loading and sparse attention
all do here what they do for the real model. Answers are words without sense.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from glm5deploy.demo.random_blocks import K_QUANTS, random_k_quants
from glm5deploy.demo.tiny_tokenizer import VOCAB_SIZE, TinyTokenizer, train
from glm5deploy.demo.written_model import add_metadata, metadata_of, placements, required
from glm5deploy.errors import DeployError
from glm5deploy.glm_dsa.file_kind import ARCHITECTURE
from glm5deploy.glm_dsa.hparams import read_hparams
from glm5deploy.glm_dsa.tensor_names import Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAME = "GLM-tiny-demo"
QUANT = "UD-Q4_K_XL"
_LAYERS = 4
_SHARD_BYTES = 6_000_000
_SEED = 5

_KEYS: dict[str, int | float | bool] = {
    "block_count": _LAYERS + 1,
    "context_length": 8192,
    "embedding_length": 256,
    "feed_forward_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "rope.freq_base": 1000000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "expert_count": 16,
    "expert_used_count": 4,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": 2,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "leading_dense_block_count": 2,
    "vocab_size": VOCAB_SIZE,
    "attention.q_lora_rank": 256,
    "attention.kv_lora_rank": 512,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "expert_feed_forward_length": 512,
    "expert_shared_count": 1,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "rope.dimension_count": 64,
    "nextn_predict_layers": 1,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 64,
}
_SCHEDULE = (True, False, True, False)

_TYPES = {
    "token_embd": "Q4_K",
    "output": "Q8_0",  # some rows are zero, which needs a packer
    "attn_q_a": "Q5_K",
    "attn_q_b": "Q6_K",
    "attn_kv_a_mqa": "Q8_0",
    "attn_k_b": "Q5_1",  # rows of 192 hold no super-block
    "attn_v_b": "Q6_K",
    "attn_output": "Q5_K",
    "indexer.attn_q_b": "Q5_K",
    "indexer.attn_k": "BF16",
    "ffn_gate": "Q5_K",
    "ffn_up": "Q5_K",
    "ffn_down": "Q6_K",
    "ffn_gate_exps": "Q4_K",
    "ffn_up_exps": "Q4_K",
    "ffn_down_exps": "Q5_K",
    "ffn_gate_shexp": "Q6_K",
    "ffn_up_shexp": "Q6_K",
    "ffn_down_shexp": "Q8_0",
    "nextn.eh_proj": "F16",
}


def write_tiny_model(folder: Path, *, quant: str = QUANT) -> tuple[Path, ...]:
    """Write the shards into ``folder`` (made if need be) and return them in order; the first has no tensors.

    About 20 MB, a second, no torch. The bytes depend on nothing but the versions of this module and numpy.
    Raises :class:`DeployError` when gguf-py or numpy is not installed.
    """
    try:
        import gguf
        import numpy  # noqa: F401
    except ImportError as error:
        raise DeployError(
            f"the demonstration writes its model with {error.name}, which is not installed",
            hint="Install glm5deploy with its cpu or gpu extra (scripts/setup.sh does).",
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train()
    writer = gguf.GGUFWriter(
        folder / f"{NAME}-{quant}.gguf", ARCHITECTURE, split_max_size=_SHARD_BYTES, small_first_shard=True
    )
    add_metadata(writer, "GLM Tiny Demo", _KEYS, _SCHEDULE, tokenizer)
    for placement in _placements():
        kind = _type_of(placement)
        data = _weights(placement, kind, tokenizer)
        writer.add_tensor(placement.name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tuple(sorted(folder.glob(f"{NAME}-{quant}-*-of-*.gguf")))


def _placements() -> Iterator[Placement]:
    marks = {"blk.0.attn_norm.weight", f"blk.{_LAYERS}.nextn.eh_proj.weight"}
    hparams = read_hparams(metadata_of(_KEYS, _SCHEDULE), marks)
    return placements(["output.weight", *required(hparams, _SCHEDULE, use_mtp=True)], hparams)


def _type_of(placement: Placement) -> str:
    return _TYPES.get(placement.kind.gguf.rsplit(".", 1)[0], "F32")


def _weights(placement: Placement, kind: str, tokenizer: TinyTokenizer) -> NDArray[np.generic]:
    """Random data in gguf-py's order (slowest dimension first), scaled so that every projection keeps its input's
    size; norms are near one and logits spread by about 4."""
    import gguf
    import numpy as np

    rng = np.random.default_rng([_SEED, zlib.crc32(placement.name.encode())])
    shape = tuple(reversed(placement.shape))
    stem = placement.kind.gguf
    # attn_k_b lies transposed: its inputs are the latent's values, the second dimension.
    inputs = placement.shape[1] if stem == "attn_k_b.weight" else placement.shape[0]
    deviation = inputs**-0.5
    if kind in K_QUANTS:
        return random_k_quants(rng, shape, kind, deviation)
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        offset = 1.0 if "norm.weight" in stem else 0.0
        return (offset + 0.05 * values).astype(np.float32)
    values *= deviation
    if stem == "output.weight":
        # Only whole words are ever likely: an answer does not end by chance, and it can be read.
        values *= 4.0
        values[[token not in tokenizer.words for token in tokenizer.tokens]] = 0
    return np.asarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))
