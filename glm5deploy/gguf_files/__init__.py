"""GGUF files without a framework: headers, shard sets, and merging a set into one file.

Nothing here knows what a model is; no torch, no numpy. Every length and offset read from a file is checked against the
file's size before it is used.
"""
