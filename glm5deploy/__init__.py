"""From split GLM-5 GGUF shards to a tensor-parallel vLLM endpoint with true sparse attention."""

__version__ = "0.1.0"
