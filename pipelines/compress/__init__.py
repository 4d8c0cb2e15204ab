"""Compression: quantization to a TensorRT-LLM checkpoint, pruning, 2:4 sparsity, and training that recovers the loss.

All access to ModelOpt goes through this package. Importing it is cheap, and so are `config`, `specs`, `texts` and
`pruned_shape`; its other modules import torch, and Transformers and ModelOpt where they are needed.
"""
