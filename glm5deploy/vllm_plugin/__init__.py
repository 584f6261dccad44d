"""The vLLM side: weight loader, model class, sparse attention backend and indexer for GLM-5 served from GGUF files.

vLLM calls :func:`register` in each of its processes, before it knows which model it will serve. Importing this package
therefore loads nothing, and registering adds names only: code of vLLM is touched later, by the model's own
configuration hook, and only for a model of this architecture that asks for one of the names below.
"""

from __future__ import annotations

LOAD_FORMAT = "glm5_gguf"
QUANTIZATION = "glm5_gguf"
BACKEND = "GLM5_TRITON_SPARSE"
PACKED = "fp8_ds_mla"  # vLLM's name of the cache that packs a token's latent row into 656 bytes
ARCHITECTURE = "GlmMoeDsaForCausalLM"
DRAFT_ARCHITECTURE = "DeepseekV32MTPModel"  # what vLLM calls the MTP block of this architecture


def register() -> None:
    """Entry point of ``vllm.general_plugins``: add our names to vLLM's registries; may be called any number of times.

    With a vLLM outside the supported range nothing is added and a warning says so, so that other models stay usable.
    """
    from glm5deploy.vllm_plugin import registration

    registration.register_all()
