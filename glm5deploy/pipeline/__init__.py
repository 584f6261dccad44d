"""Resumable stages: what a stage is, what it left behind, whether that still holds, and the one runner for all.

Knows nothing of GGUF, hubs or vLLM.
"""
