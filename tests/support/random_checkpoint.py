"""A TensorRT-LLM checkpoint of a Llama of any size with random weights, in the formats that ModelOpt exports.

Names, types and shapes are those of ModelOpt's own exports (TensorRT-LLM `legacy/architecture/checkpoint.md`). The
values do not matter for its uses: tests of memory, file sizes and speed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape

GROUP = 128


@dataclass
class _Writer:
    """Makes tensors of one format."""

    qformat: QFormat
    rng: np.random.Generator

    def weights(self, name: str, shape: tuple[int, int]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the tensors of one linear layer [out, in]."""
        out, size = shape
        scalar = np.full(1, 0.01, dtype=np.float32)
        if self.qformat is QFormat.FP8:
            weight = self.rng.normal(0, 1, shape).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            extra = {"activation_scaling_factor": scalar, "weights_scaling_factor": scalar.copy()}
        elif self.qformat is QFormat.INT8_SQ:
            weight = self.rng.integers(-127, 128, shape, dtype=np.int8)
            extra = {
                "activation_scaling_factor": scalar,
                "weights_scaling_factor": np.full(out, 1e-4, dtype=np.float32),
                "prequant_scaling_factor": np.ones(size, dtype=ml_dtypes.bfloat16),
            }
        elif self.qformat is QFormat.INT4_AWQ:
            weight = self.rng.integers(-128, 128, (out // 2, size), dtype=np.int8)
            extra = {
                "weights_scaling_factor": np.full((out, size // GROUP), 1e-3, dtype=np.float32),
                "prequant_scaling_factor": np.ones(size, dtype=ml_dtypes.bfloat16),
            }
        else:
            weight, extra = self.bf16(*shape), {}
        return {f"{name}.weight": weight} | {f"{name}.{key}": value for key, value in extra.items()}

    def bf16(self, *shape: int) -> np.ndarray[Any, Any]:
        """Return small random numbers."""
        return (self.rng.standard_normal(shape, dtype=np.float32) * 0.02).astype(ml_dtypes.bfloat16)


def write_checkpoint(folder: Path, shape: ModelShape, qformat: QFormat) -> Path:
    """Write config.json and rank0.safetensors.

    Args:
        folder: the folder to create.
        shape: shape of a Llama with untied embeddings.
        qformat: any format except w4a8_awq and nvfp4.

    Returns:
        the folder.
    """
    make = _Writer(qformat, np.random.default_rng(7))
    tensors = {
        "transformer.vocab_embedding.weight": make.bf16(shape.vocab_size, shape.hidden_size),
        "lm_head.weight": make.bf16(shape.vocab_size, shape.hidden_size),
        "transformer.ln_f.weight": make.bf16(shape.hidden_size),
    }
    for layer in range(shape.num_hidden_layers):
        prefix = f"transformer.layers.{layer}"
        for name, size in shape.linear_shapes.items():
            tensors |= make.weights(f"{prefix}.{name}", size)
        for norm in ("input_layernorm", "post_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = make.bf16(shape.hidden_size)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config(shape, qformat)))
    save_file(tensors, folder / "rank0.safetensors")
    return folder


def _config(shape: ModelShape, qformat: QFormat) -> dict[str, Any]:
    quantization: dict[str, Any] = {"quant_algo": FORMATS[qformat].quant_algo, "kv_cache_quant_algo": None}
    if qformat is not QFormat.NONE:
        quantization["exclude_modules"] = ["lm_head"]
    if qformat is QFormat.INT4_AWQ:
        quantization |= {"group_size": GROUP, "has_zero_point": False, "pre_quant_scale": True}
    return {
        "architecture": shape.architecture,
        "dtype": "bfloat16",
        "logits_dtype": "float16",
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "hidden_size": shape.hidden_size,
        "norm_epsilon": 1e-05,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": "silu",
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": False,
        "rotary_base": 10000.0,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": quantization,
    }
