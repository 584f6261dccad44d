"""Portable sparse MLA and lightning indexer for GLM-5: Triton kernels, each beside a plain torch reference.

Nothing is imported here: `reference` needs torch alone and serves the CPU engine; the other modules need triton.
"""
