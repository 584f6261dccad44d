"""What kind of file this is: a whole GLM-5 model, or one of those that only look like it."""

from __future__ import annotations

from collections.abc import Collection

from glm5deploy.errors import FileFormatError
from glm5deploy.glm_dsa.metadata import Metadata, describe, missing, read_string

ARCHITECTURE = "glm-dsa"


def require_glm_dsa(metadata: Metadata) -> None:
    """Raise :class:`FileFormatError` unless the metadata are those of a whole ``glm-dsa`` model."""
    architecture = read_string(metadata, "general.architecture")
    if architecture is None:
        if "split.no" in metadata:
            raise FileFormatError(
                "the metadata holds split keys only; the model's metadata are in the first shard",
                hint="Name the shard that ends in -00001-of-0000N.gguf, or the folder with all shards.",
            )
        raise missing("general.architecture")
    if architecture != ARCHITECTURE:
        what = "GLM-5.3-Flash, another architecture" if architecture == "glm5-next" else "not a GLM-5 family model"
        raise FileFormatError(
            f"general.architecture is {describe(architecture)} ({what}); this program serves {ARCHITECTURE!r}",
            hint="Choose a GGUF of GLM-5, GLM-5.1, GLM-5.2 or GLM-5.3.",
        )
    kind = read_string(metadata, "general.type")
    if kind not in (None, "model"):
        raise FileFormatError(f"general.type is {describe(kind)}, not 'model'", hint="Choose the model's own GGUF.")


def present_mtp_blocks(num_layers: int, num_nextn: int, tensor_names: Collection[str]) -> int:
    """How many of the ``num_nextn`` MTP blocks named in the metadata are in the tensor table: all of them or 0.

    Raises :class:`FileFormatError` when the hidden layers are absent (a draft-only file, or a later shard's table).
    """
    if "blk.0.attn_norm.weight" not in tensor_names:
        if num_nextn and f"blk.{num_layers}.attn_norm.weight" in tensor_names:
            raise FileFormatError(
                "this is a draft-only file: it holds the MTP block but none of the hidden layers",
                hint="Take the full model; its MTP block is part of it.",
            )
        raise FileFormatError(
            "tensor blk.0.attn_norm.weight is missing: the tensor table holds no first layer",
            hint="Name the whole shard set, not one of its later shards.",
        )
    present = [f"blk.{num_layers + i}.nextn.eh_proj.weight" in tensor_names for i in range(num_nextn)]
    return num_nextn if all(present) else 0
