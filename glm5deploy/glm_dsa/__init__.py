"""What is known about the ``glm-dsa`` architecture (GLM-5, 5.1, 5.2, 5.3), in plain Python and without torch.

From a GGUF's metadata and tensor table to hyper-parameters, the indexer schedule, Hugging Face names and files, legal
tensor-parallel cuts, and bytes of memory.
"""
