"""Write a TensorRT-LLM checkpoint whose tensors follow from those of the model alone: in 16 bit, or rounded to INT4.

Tensors get other names, q, k and v are joined, and each rank gets its part. Nothing is calibrated, so neither ModelOpt
nor Transformers is needed, whose imports take seconds. The files are those that ModelOpt exports, byte for byte;
config.json has the same entries, and names another producer.

Shapes: O output channels, I input channels, G groups of input channels.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipelines.checkpoint.config_json import WINDOWS, CheckpointConfig
from pipelines.checkpoint.describe import describe
from pipelines.checkpoint.unified import expected_tensors
from pipelines.checkpoint.verify import layer_tensors
from pipelines.compress.calibration import ProgressRecord, calibration_facts, new_files_removed, stamp
from pipelines.compress.checkpoint_layout import RankFiles, copy_vocabulary
from pipelines.compress.config import CalibrationSettings
from pipelines.compress.expert_weights import ExpertWeights
from pipelines.compress.model_folder import EMBEDDING, HEAD, NORM, ModelFolder, ModelWeights, torch_dtype
from pipelines.compress.postprocess import corrected
from pipelines.compress.specs import Layout, QuantSpec
from pipelines.domain.errors import UserError
from pipelines.domain.families import SOFT_CAPS
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.progress import Progress
from pipelines.domain.rotary import Rotary, local_rope

LINEARS = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
"""Linears of a checkpoint's layer, and what they are in the Hugging Face model."""
_FUSED_LINEARS = {
    "attention.qkv": ("self_attn.qkv_proj",),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
"""The same for families whose linears are fused."""
NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}
"""Norms of the layers of every family, likewise."""
_PRODUCER = {"name": "trtllm-pipelines", "version": version("trtllm-pipelines")}


def names_of(layer: int, module: str, linears: Mapping[str, Sequence[str]] = LINEARS) -> list[str]:
    """Return the linears of the Hugging Face model that are one in a checkpoint."""
    return [f"model.layers.{layer}.{name}" for name in linears[module]]


class RoundedLinear(NamedTuple):
    """A weight in INT4 under scales of groups, as TensorRT-LLM's checkpoints hold it.

    Attributes:
        weight: two neighbouring outputs in a byte, int8 [O / 2, I].
        weights_scaling_factor: float32 [O, G].
    """

    weight: torch.Tensor
    weights_scaling_factor: torch.Tensor


_AT_ONCE = 2**18
"""Weights that are rounded at once: they stay in the processor's caches."""


def rounded(weight_oi: torch.Tensor, group: int, name: str) -> RoundedLinear:
    """Round a weight to INT4 to nearest; the largest weight of a group is 7 times its scale.

    A group of zeros gets the largest scale of the weight, which is exact under any scale.

    Args:
        weight_oi: finite; O is even.
        group: input channels that share a scale.
        name: of the linear, for messages.

    Raises:
        UserError: all weights are zero.
    """
    outputs, inputs = weight_oi.shape
    packed = torch.empty(outputs // 2, inputs, dtype=torch.int8)
    largest_og = torch.empty(outputs, inputs // group)
    rows = max(2, _AT_ONCE // inputs // 2 * 2)
    for start in range(0, outputs, rows):
        values = weight_oi[start : start + rows].float().reshape(-1, inputs // group, group)
        largest = torch.amax(values.abs(), 2, out=largest_og[start : start + rows])
        scales = largest.div(7).masked_fill_(largest == 0, 1)
        codes = values.div_(scales[:, :, None]).round_().to(torch.int8).reshape(-1, inputs)
        torch.bitwise_or(codes[0::2] & 15, codes[1::2] << 4, out=packed[start // 2 : (start + rows) // 2])
    most = largest_og.max()
    if most == 0:
        raise UserError(
            f"The weights of the layer '{name}' are all zero.",
            todo="No scale can be computed for them; check the model's weights.",
        )
    return RoundedLinear(packed, torch.where(largest_og > 0, largest_og, most).div_(7))


class CheckpointTensors:
    """The tensors of a Hugging Face folder under the names of a TensorRT-LLM checkpoint."""

    def __init__(self, source: ModelFolder, dtype: torch.dtype, group: int = 0) -> None:
        """Read the headers.

        Args:
            source: the model.
            dtype: of the checkpoint.
            group: input channels of a linear that share a scale in INT4; 0 leaves linears in 16 bit.
        """
        self.weights = ExpertWeights(source) if source.shape.family.gpt_oss else ModelWeights(source)
        self.dtype = dtype
        self._shape, self._family, self._group = source.shape, source.shape.family, group
        self._linears = _FUSED_LINEARS if self._family.fused_linears else LINEARS
        self._rounded: tuple[list[str], RoundedLinear] | None = None
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
        if leaf == "sinks":
            return self._read(f"model.layers.{layer}.self_attn.sinks")
        if module.startswith("mlp.") and self._family.experts is not None:
            return self._of_experts(int(layer), module, leaf)
        if leaf == "bias" or module in self._linears:
            whole = self._joined(names_of(int(layer), module, self._linears), leaf)
            # TensorRT-LLM's MLP takes up first, gate second
            return torch.cat(whole.chunk(2)[::-1]) if self._family.fused_linears and module == "mlp.fc" else whole
        if module.startswith("attention."):
            head_norm = self._family.head_norms[module.removeprefix("attention.")]
            return self._norm(f"model.layers.{layer}.self_attn.{head_norm}.weight")
        return self._norm(f"model.layers.{layer}.{NORMS.get(module, module)}.weight")

    def _joined(self, names: list[str], leaf: str) -> torch.Tensor:
        """Return a tensor that consists of those of these linears, rounded where they are in INT4."""
        if self._group and leaf in RoundedLinear._fields:
            linear: torch.Tensor = getattr(self._rounded_linear(names), leaf)
            return linear
        parts = [self._read(f"{name}.{leaf}") for name in names]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _of_experts(self, layer: int, module: str, leaf: str) -> torch.Tensor:
        """Return the router [E, I], in float32 as TensorRT-LLM computes it, or a tensor of all experts [E, ...].

        A bias is [E], or that of all experts [E, O].
        """
        assert self._family.experts is not None
        if module == "mlp.router":
            return self._read(f"model.layers.{layer}.{self._family.router}.{leaf}").float()
        if leaf == "bias":
            names = [f"{name}.bias" for names in self.linears_of_experts(layer, module) for name in names]
            return torch.stack([self._read(name) for name in names]).reshape(self._shape.num_experts, -1)
        joined = self._joined([name for names in self.linears_of_experts(layer, module) for name in names], leaf)
        return joined.reshape(self._shape.num_experts, -1, joined.shape[1])

    def linears_of_experts(self, layer: int, module: str) -> list[list[str]]:
        """Return for each expert the linears of the Hugging Face model that are one in a checkpoint: up before gate."""
        assert self._family.experts is not None
        place, (gate, up, down) = self._family.experts
        linears = (up, gate) if module == "mlp.fc" else (down,)
        prefix = f"model.layers.{layer}.{place}.experts"
        return [[f"{prefix}.{number}.{name}" for name in linears] for number in range(self._shape.num_experts)]

    def write_ends(self, files: RankFiles, progress: Progress) -> None:
        """Write what is outside of layers."""
        files.write(norm := "transformer.ln_f.weight", self.tensor(norm))
        rows = self._shape.vocab_size
        copy_vocabulary(files.writer, self.weights, self.head, self.dtype, files.layout, rows, progress)

    def _rounded_linear(self, names: list[str]) -> RoundedLinear:
        """Return the weight that consists of those of these linears; the last one is kept."""
        if self._rounded is None or self._rounded[0] != names:
            self._rounded = None
            parts = [rounded(self._read(f"{name}.weight"), self._group, name) for name in names]
            self._rounded = names, RoundedLinear(*map(torch.cat, zip(*parts, strict=True)))
        return self._rounded[1]

    def _norm(self, name: str) -> torch.Tensor:
        return self._read(name) + self._family.norm_offset

    def _read(self, name: str) -> torch.Tensor:
        return self.weights.tensor(name, self.dtype)


class Split(NamedTuple):
    """Ranks of a checkpoint.

    Attributes:
        moe_ep_size: parts of the tensor-parallel ranks between which the experts of a mixture are divided.
    """

    tp_size: int = 1
    pp_size: int = 1
    moe_ep_size: int = 1


@dataclass(frozen=True, slots=True)
class QuantizeTask:
    """What to make of a model folder; see `pipelines.compress.quantizing.quantize`."""

    source: ModelFolder
    spec: QuantSpec
    texts: Iterable[str]
    calibration: CalibrationSettings
    split: Split
    dtype: str
    device: str
    layout: Layout


def write_by_tensor(task: QuantizeTask, out_dir: Path, progress: Progress) -> dict[str, Any]:
    """Write the checkpoint of a model whose linears stay in 16 bit until the engine is built, or are rounded to INT4.

    A run that was stopped is continued after the last complete layer.

    Returns:
        the facts of `pipelines.checkpoint.describe`, and the keys `calibration`, `device` and `tool`.

    Raises:
        UserError: a tensor is missing, has another shape or is not finite, all weights of a linear that is rounded are
            zero, the head contradicts config.json, or the disk has too little space.
    """
    source, spec = task.source, task.spec
    with new_files_removed(out_dir):
        group = 0 if spec.sixteen_bit else spec.quant.group_size
        tensors = CheckpointTensors(source, torch_dtype(task.dtype), group)
        block = {"quant_algo": None, "kv_cache_quant_algo": None} | quantization_block(spec.quant.qformat, group)
        block |= {"exclude_modules": ["lm_head"]} if group else {}
        write_config(task, out_dir, block, _PRODUCER)
        config = CheckpointConfig.load(out_dir)
        _check(source, tensors)
        identity = [spec.quant.qformat, group, *task.split, task.dtype, stamp(source), torch.__version__]
        record = ProgressRecord(out_dir, {"sixteen_bit": identity})
        _write(tensors, config, out_dir, record, progress)
    record.close()
    return {**describe(out_dir), "calibration": calibration_facts(None, 0.0), "device": "cpu", "tool": {}}


def _write(
    tensors: CheckpointTensors, config: CheckpointConfig, out_dir: Path, record: ProgressRecord, progress: Progress
) -> None:
    """Write every layer that `record` does not know yet, and what is outside of layers."""
    layers = config.num_hidden_layers
    files = RankFiles(config, out_dir, begun=record.layers > 0)
    record.announce(layers, progress)
    with progress.task("copying layers", layers - record.layers, "layers") as advance:
        for number in range(record.layers, layers):
            for name in layer_tensors(config, prefix := f"transformer.layers.{number}"):
                files.write(f"{prefix}.{name}", tensors.tensor(f"{prefix}.{name}"))
            files.writer.sync()
            record.complete(number + 1)
            advance(1)
    tensors.write_ends(files, progress)


def _check(source: ModelFolder, tensors: CheckpointTensors) -> None:
    """Reject a folder that is not the model that its config.json describes."""
    shape, weights, tied = source.shape, tensors.weights, source.shape.tie_word_embeddings
    stored = replace(shape, mxfp4="model.layers.0.mlp.experts.down_proj_blocks" in weights)
    weights.require({name: spec.shape for name, spec in expected_tensors(source.config, stored, {}, "BF16").items()})
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


def write_config(
    task: QuantizeTask, out_dir: Path, quantization: Mapping[str, Any], producer: Mapping[str, str]
) -> dict[str, Any]:
    """Write config.json as ModelOpt would, corrected, into a folder, which is created; return its content."""
    config = checkpoint_config(task.source, task.dtype, quantization, producer, task.split)
    config = corrected(config, task.source.config, task.spec)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return config


def checkpoint_config(
    source: ModelFolder,
    dtype: str,
    quantization: Mapping[str, Any],
    producer: Mapping[str, str],
    split: Split,
) -> dict[str, Any]:
    """Return what ModelOpt would write into config.json, before it is corrected."""
    shape, config = source.shape, source.shape.family.settled(source.config)
    tp_size, pp_size, ep_size = split
    mapping = {"world_size": tp_size * pp_size, "tp_size": tp_size, "pp_size": pp_size}
    mapping |= {"moe_tp_size": tp_size // ep_size, "moe_ep_size": ep_size} if ep_size > 1 else {}
    activation = "hidden_act" if "hidden_act" in shape.family.defaults else "hidden_activation"
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
        "hidden_act": "swiglu" if shape.family.fused_linears else config[activation],
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        "head_size": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "position_embedding_type": "rope_gpt_neox",
        "share_embedding_table": shape.family.head_is_embedding and pp_size == 1,
        "residual_mlp": False,
        "bias": shape.family.attention_bias and bool(config.get("attention_bias")),  # of the output projection
        "rotary_pct": Rotary.of(config).fraction,
        "rank": tp_size * pp_size - 1,
        "decoder": shape.family.modelopt_type,
        "rmsnorm": True,
        "lm_head_bias": False,
        "mapping": mapping,
        "quantization": dict(quantization),
        **(_mixture(shape, config) if shape.family.experts else {}),
        **(_windows(shape, config) if shape.family.states_window and shape.family.by_tensor else {}),
    }


def _mixture(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what says how tokens go through experts, in the terms of TensorRT-LLM's MoeConfig."""
    moe = {
        "num_experts": shape.num_experts,
        "top_k": shape.num_experts_per_token,
        "normalization_mode": int(config.get("norm_topk_prob", True)),  # of Mixtral always
    }
    act = "swigluoai" if shape.family.gpt_oss else "swiglu"  # vLLM's name of it; TensorRT-LLM 1.2 has none
    return {"hidden_act": act, "moe": moe, "moe_intermediate_size": shape.intermediate_size}


def _windows(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what says which layers have a window, and how Gemma 2 and 3 differ from Gemma.

    Source: TensorRT-LLM `models/gemma/config.py`, `Gemma2ConfigGroup` and `Gemma3ConfigGroup` of
    `models/modeling_utils.py`.
    """
    window = {"sliding_window": shape.sliding_window or None}
    pattern = shape.global_every or shape.num_hidden_layers + 1
    if not shape.family.more_norms:
        return window | ({"_sliding_window_pattern": pattern} if shape.family.gpt_oss else {})
    both = {"inter_layernorms": True} | {key: config[key] for key in ("query_pre_attn_scalar", SOFT_CAPS[1])}
    if not (rope := local_rope(config)):
        return both | {SOFT_CAPS[0]: config[SOFT_CAPS[0]], WINDOWS: list(shape.windows)}
    local = {"rope_local_base_freq": rope["rope_local_base_freq"]}
    return window | both | {"_sliding_window_pattern": pattern} | local


def quantization_block(qformat: QFormat, group_size: int, points: bool = False) -> dict[str, Any]:
    """Return how linears are quantized, in the entries that ModelOpt writes into config.json."""
    form = FORMATS[qformat]
    block: dict[str, Any] = {"quant_algo": form.quant_algo}
    if group := form.weights.group_size(group_size):
        block["group_size"] = group
    if form.weights.pairs_outputs:
        block |= {"has_zero_point": points, "pre_quant_scale": form.tuning == "awq"}
    return block
