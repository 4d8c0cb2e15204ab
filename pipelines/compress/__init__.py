"""Compression: quantization to a TensorRT-LLM checkpoint, pruning, 2:4 sparsity, and training that recovers the loss.

All access to ModelOpt goes through this package. Importing it is cheap: torch, transformers and ModelOpt are
imported only when the work starts.
"""

from pipelines.compress.api import (
    fake_quantized_model,
    prune_model,
    quantize,
    recover,
    reference_model,
    sparsify,
    trace_checkpoint,
    trace_model,
)
from pipelines.compress.pruning_spec import PruningSpec
from pipelines.compress.specs import CalibrationSpec, LoraSpec, QuantSpec, RecoverySpec, RoundingSpec, SparsitySpec
from pipelines.compress.texts import load_texts

__all__ = [
    "CalibrationSpec",
    "LoraSpec",
    "PruningSpec",
    "QuantSpec",
    "RecoverySpec",
    "RoundingSpec",
    "SparsitySpec",
    "fake_quantized_model",
    "load_texts",
    "prune_model",
    "quantize",
    "recover",
    "reference_model",
    "sparsify",
    "trace_checkpoint",
    "trace_model",
]
