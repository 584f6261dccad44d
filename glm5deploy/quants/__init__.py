"""GGML block types on the GPU: what their bits mean, how they lie in memory, and products that read them once.

``formats`` names every type and its fields (no torch), ``planes`` moves blocks into kernel order and back,
``reference`` dequantises in fp32, ``products`` multiplies (Triton). See README.md in this folder.
"""
