"""Write a model in 16 bit as a TensorRT-LLM checkpoint: other names, q, k and v joined, and a part for each rank.

Nothing is calibrated or rounded, so neither ModelOpt nor Transformers is needed, whose imports take seconds. The files
are those that ModelOpt exports, byte for byte; config.json has the same entries, and names another producer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipelines.checkpoint.config_json import CheckpointConfig
from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.unified import linear_shapes
from pipelines.checkpoint.verify import expected_tensors, has_bias
from pipelines.compress.calibration import ProgressRecord, calibration_facts, new_files_removed, stamp
from pipelines.compress.checkpoint_layout import RanksLayout, copy_vocabulary
from pipelines.compress.model_folder import EMBEDDING, HEAD, NORM, ModelFolder, ModelWeights, TensorWriter, torch_dtype
from pipelines.compress.postprocess import corrected
from pipelines.compress.specs import QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import Progress

LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
"""Linears of a checkpoint's layer, and what they are in the Hugging Face model."""
NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
"""Norms of the layers of every family, likewise."""
_BY_INPUTS = ("attention.dense.weight", "mlp.proj.weight")
"""Split over ranks by their inputs; all other tensors of linears by their outputs."""
_BY_OUTPUTS = ("mlp.fc", "mlp.gate")
_PRODUCER = {"name": "trtllm-pipelines", "version": version("trtllm-pipelines")}


def names_of(layer: int, module: str) -> list[str]:
    """Return the linears of the Hugging Face model that are one in a checkpoint."""
    return [f"model.layers.{layer}.{name}" for name in LINEARS[module]]


class SixteenBitTensors:
    """The tensors of a Hugging Face folder under the names of a TensorRT-LLM checkpoint."""

    def __init__(self, source: ModelFolder, dtype: torch.dtype) -> None:
        """Read the headers; `dtype` is that of the checkpoint."""
        self.weights, self.dtype = ModelWeights(source), dtype
        self._family = source.shape.family
        self.head = HEAD if HEAD in self.weights else EMBEDDING

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor by its name in a checkpoint of one rank.

        Raises:
            UserError: it is not finite, or is not stored in a type of floats.
        """
        if name == "transformer.vocab_embedding.weight":
            return self._read(EMBEDDING)
        if name == "lm_head.weight":
            return self._read(self.head)
        if name == "transformer.ln_f.weight":
            return self._norm(NORM)
        _, _, layer, rest = name.split(".", 3)
        module, _, leaf = rest.rpartition(".")
        if leaf == "bias" or module in LINEARS:
            parts = [self._read(f"{each}.{leaf}") for each in names_of(int(layer), module)]
            return torch.cat(parts) if len(parts) > 1 else parts[0]
        if module.startswith("attention."):
            head_norm = self._family.head_norms[module.removeprefix("attention.")]
            return self._read(f"model.layers.{layer}.self_attn.{head_norm}.weight")
        return self._norm(f"model.layers.{layer}.{NORMS[module]}.weight")

    def _norm(self, name: str) -> torch.Tensor:
        return self._read(name) + self._family.norm_offset

    def _read(self, name: str) -> torch.Tensor:
        return self.weights.tensor(name, self.dtype)


def _rank_part(shape: ModelShape, tp_size: int, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a tensor, by its name within the layer.

    With more ranks than key and value heads, neighbouring ranks have the same head.
    """
    if tp_size == 1:
        return whole
    if name in _BY_INPUTS:
        return whole.chunk(tp_size, dim=1)[rank]
    if name.startswith(_BY_OUTPUTS):
        return whole.chunk(tp_size)[rank]
    if not name.startswith("attention.qkv."):
        return whole
    heads = (shape.num_attention_heads, *[shape.num_key_value_heads] * 2)
    rows = torch.split(whole, [count * shape.head_dim for count in heads])
    parts = [min(count, tp_size) for count in heads]
    return torch.cat([each.chunk(n)[rank * n // tp_size] for each, n in zip(rows, parts, strict=True)])


def write_sixteen_bit(
    source: ModelFolder, out_dir: Path, spec: QuantSpec, dtype: str, tp_size: int, pp_size: int, progress: Progress
) -> dict[str, Any]:
    """Write the checkpoint of a model whose linears stay in 16 bit until the engine is built.

    A run that was stopped is continued after the last complete layer.

    Args:
        source: the model.
        out_dir: where to write.
        spec: format; none, or one whose weights are quantized when the engine is built.
        dtype: "bfloat16" or "float16".
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages.
        progress: shows layers.

    Returns:
        the facts of `pipelines.checkpoint.describe`, and the keys `calibration`, `device` and `tool`.

    Raises:
        UserError: a tensor is missing, has another shape or is not finite, the head contradicts config.json, or the
            disk has too little space.
    """
    with new_files_removed(out_dir):
        tensors = SixteenBitTensors(source, torch_dtype(dtype))
        block = {"quant_algo": None, "kv_cache_quant_algo": None}
        raw = checkpoint_config(source, dtype, block, _PRODUCER, tp_size=tp_size, pp_size=pp_size)
        out_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(corrected(raw, source.config, spec), indent=2)
        (out_dir / "config.json").write_text(text + "\n", encoding="utf-8")
        config = CheckpointConfig.load(out_dir)
        _check(source, tensors, config)
        identity = [spec.quant.qformat, tp_size, pp_size, dtype, stamp(source), torch.__version__]
        record = ProgressRecord(out_dir, {"sixteen_bit": identity})
        _write(source.shape, tensors, config, out_dir, record, progress)
    record.close()
    return {**describe(out_dir), "calibration": calibration_facts(None, 0.0), "device": "cpu", "tool": {}}


def _write(
    shape: ModelShape,
    tensors: SixteenBitTensors,
    config: CheckpointConfig,
    out_dir: Path,
    record: ProgressRecord,
    progress: Progress,
) -> None:
    """Write every layer that `record` does not know yet, and what is outside of layers."""
    tp_size, layers = config.tp_size, config.num_hidden_layers
    per_stage = layers // config.pp_size
    expected = {f"rank{rank}.safetensors": expected_tensors(config, rank) for rank in range(config.world_size)}
    if record.layers:
        writer = TensorWriter(out_dir, list(expected))
    else:
        layouts = {
            file: {name: (e.dtype, e.shape) for name, e in in_file.items()} for file, in_file in expected.items()
        }
        writer = TensorWriter.create(out_dir, layouts)
    record.announce(layers, progress)
    with progress.task("copying layers", layers - record.layers, "layers") as advance:
        for number in range(record.layers, layers):
            stage, local = divmod(number, per_stage)
            files = [f"rank{stage * tp_size + rank}.safetensors" for rank in range(tp_size)]
            prefix = f"transformer.layers.{local}."
            for name in [name.removeprefix(prefix) for name in expected[files[0]] if name.startswith(prefix)]:
                whole = tensors.tensor(f"transformer.layers.{number}.{name}")
                for rank, file in enumerate(files):
                    writer.write(file, prefix + name, iter([_rank_part(shape, tp_size, name, whole, rank)]))
            writer.sync()
            record.complete(number + 1)
            advance(1)
    for rank in range(config.world_size - tp_size, config.world_size):
        norm = "transformer.ln_f.weight"
        writer.write(f"rank{rank}.safetensors", norm, iter([tensors.tensor(norm)]))
    layout = RanksLayout(layers, tp_size, config.pp_size)
    copy_vocabulary(writer, tensors.weights, tensors.head, tensors.dtype, layout, shape.vocab_size, progress)


def _check(source: ModelFolder, tensors: SixteenBitTensors, config: CheckpointConfig) -> None:
    """Reject a folder that is not the model that its config.json describes."""
    shape, weights = source.shape, tensors.weights
    tied = shape.tie_word_embeddings
    table = (shape.vocab_size, shape.hidden_size)
    sizes = linear_shapes(shape)
    of_a_layer: dict[str, tuple[int, ...]] = {}
    for module, linears in LINEARS.items():
        of_a_layer |= {f"{linear}.weight": sizes[linear] for linear in linears}
        if has_bias(config, module):
            of_a_layer |= {f"{linear}.bias": sizes[linear][:1] for linear in linears}
    of_a_layer |= {f"{NORMS[norm]}.weight": (shape.hidden_size,) for norm in shape.family.layer_norms}
    of_a_layer |= {f"self_attn.{norm}.weight": (shape.head_dim,) for norm in shape.family.head_norms.values()}
    shapes = {EMBEDDING: table, NORM: (shape.hidden_size,), (EMBEDDING if tied else HEAD): table}
    for layer in range(shape.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": each for name, each in of_a_layer.items()}
    weights.require(shapes)
    own = HEAD in weights and not weights.same(EMBEDDING, HEAD, tensors.dtype)
    if own and not tied and shape.family.head_is_embedding:
        raise UserError(
            f"{source.folder} has its own '{HEAD}', which TensorRT-LLM's {shape.family.title} does not have.",
            todo="Give a model whose output head is its embedding.",
        )
    if own and tied:
        raise UserError(
            f"{source.folder} has its own '{HEAD}', but its config.json has tie_word_embeddings=true.",
            todo="Remove the tensor, or set tie_word_embeddings=false in config.json.",
        )


def checkpoint_config(
    source: ModelFolder,
    dtype: str,
    quantization: Mapping[str, Any],
    producer: Mapping[str, str],
    *,
    tp_size: int = 1,
    pp_size: int = 1,
) -> dict[str, Any]:
    """Return what ModelOpt would write into config.json, before it is corrected."""
    shape, config = source.shape, source.shape.family.settled(source.config)
    return {
        "producer": dict(producer),
        "architecture": shape.architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "hidden_size": shape.hidden_size,
        "norm_epsilon": config["rms_norm_eps"],
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "hidden_act": config["hidden_act"],
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": shape.family.head_is_embedding and pp_size == 1,
        "residual_mlp": False,
        "bias": shape.family.attention_bias and bool(config.get("attention_bias")),  # of the output projection
        "rotary_pct": 1.0,
        "rank": tp_size * pp_size - 1,
        "decoder": shape.family.modelopt_type,
        "rmsnorm": True,
        "lm_head_bias": False,
        "mapping": {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size},
        "quantization": dict(quantization),
    }
