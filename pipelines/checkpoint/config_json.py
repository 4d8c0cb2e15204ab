"""config.json of a TensorRT-LLM checkpoint, as written by ModelOpt and read by trtllm-build.

Fields and defaults: TensorRT-LLM 1.2 `PretrainedConfig` and `QuantConfig` (`modeling_utils.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Self

from pipelines.domain.errors import UserError, did_you_mean, shown
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, FormatSpec, KvFormat, QFormat, stored_as
from pipelines.host.files import json_object

# quant_cfg.json of a MIXED_PRECISION checkpoint: how each linear is quantized, by the name of its module.
#
# Source: TensorRT-LLM 1.2 `modeling_utils.py` (`PretrainedConfig.to_layer_quant_config`, `LayerQuantConfig`): it
# reads
# `quantized_layers` from the file beside config.json, takes the first pattern that matches a module's name, and
# leaves a
# module without one in 16 bit.

KV_SCALE = "_cache_scaling_factor"
"""How the names of the scales of a KV cache end."""
WINDOWS = "attention_windows"
"""Tokens that layers of a Gemma 2 attend to, a pattern over them; TensorRT-LLM drops `sliding_window` there."""
LAYERS_FILE = "quant_cfg.json"
MIXED = "MIXED_PRECISION"
"""`quant_algo` of a checkpoint whose linears have formats of their own."""

LINEARS = ("attention.qkv", "attention.dense", "mlp.fc", "mlp.gate", "mlp.proj")
"""Linears of a decoder layer, by their names within it."""

_AGAIN = "Export the checkpoint again."


def read_layers(folder: Path, kv_cache_quant_algo: str | None) -> Mapping[str, Mapping[str, Any]]:
    """Return module pattern -> `quantization` block, in the order of the file.

    Args:
        folder: the checkpoint.
        kv_cache_quant_algo: of config.json; TensorRT-LLM takes that of this file.

    Raises:
        UserError: the file is missing, not JSON, has no `quantized_layers`, or another KV cache than config.json.
    """
    path = folder / LAYERS_FILE
    if not path.is_file():
        raise UserError(
            f"{folder} has quant_algo={MIXED}, but no {LAYERS_FILE}, which says how each linear is quantized.",
            todo=_AGAIN,
        )
    raw = json_object(path, todo=_AGAIN)
    layers = raw.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        raise UserError(f"{path} has quantized_layers={shown(layers)}.", allowed="It must name at least one module.")
    if raw.get("kv_cache_quant_algo") != kv_cache_quant_algo:
        raise UserError(
            f"{path} has kv_cache_quant_algo={shown(raw.get('kv_cache_quant_algo'))}, config.json has"
            f" {shown(kv_cache_quant_algo)}.",
            todo=_AGAIN,
        )
    for name, block in layers.items():
        if not isinstance(block, Mapping):
            raise UserError(f"{path} has '{name}': {shown(block)}.", allowed="It must be an object.")
    return layers


LARGEST_NUMBER = 1e300
"""JSON has integers that no float holds, and NaN."""
DTYPES = ("float16", "bfloat16", "float32")

DEFAULT_EXCLUDED = ("lm_head", "router", "vocab_embedding", "position_embedding", "block_embedding")
"""Modules that TensorRT-LLM leaves in 16 bit when `exclude_modules` is absent."""

_KV_FORMATS = {None: KvFormat.AUTO, "FP8": KvFormat.FP8, "INT8": KvFormat.INT8}


def windows_of(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the tokens that each layer attends to, where config.json states it; 0 is all."""
    window, every = raw.get("sliding_window") or 0, raw.get("_sliding_window_pattern") or 0
    return tuple(0 if every and (layer + 1) % every == 0 else window for layer in range(layers))


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization` block; names and defaults are TensorRT-LLM's.

    Attributes:
        quant_algo: e.g. "FP8", "W4A16_AWQ"; None means 16 bit.
        kv_cache_quant_algo: "FP8", "INT8" or None.
        group_size: input channels per weight scale (AWQ 128, NVFP4 16).
        clamp_val: [min, max] for FP8 rowwise, or None.
        use_meta_recipe: FP8 rowwise as Meta publishes it.
        has_zero_point: each group has a zero point beside its scale, the tensor `zero`.
        pre_quant_scale: activations are multiplied by a scale per channel first, the tensor `prequant_scaling_factor`.
        exclude_modules: patterns of modules left in 16 bit, or None for TensorRT-LLM's default.
        mamba_ssm_cache_dtype: unused here; kept because TensorRT-LLM accepts it.
    """

    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    group_size: int = 128
    smoothquant_val: float = 0.5
    clamp_val: tuple[float, ...] | None = None
    use_meta_recipe: bool = False
    has_zero_point: bool = False
    pre_quant_scale: bool = False
    exclude_modules: tuple[str, ...] | None = None
    mamba_ssm_cache_dtype: str | None = None

    @classmethod
    def parse(cls, block: Mapping[str, Any], source: str) -> Self:
        """Parse the block strictly: TensorRT-LLM rejects unknown keys too.

        Raises:
            UserError: a key or the KV-cache format is unknown.
        """
        names = {f.name for f in fields(cls)}
        for key in block:
            if key not in names:
                raise UserError(
                    f"{source} has the unknown key '{key}' in its quantization block.",
                    allowed=f"Keys known to TensorRT-LLM: {', '.join(sorted(names))}.",
                    todo=did_you_mean(key, names),
                )
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in block.items()}
        parsed = cls(**values)
        if parsed.kv_cache_quant_algo not in _KV_FORMATS:
            raise UserError(
                f"{source} has kv_cache_quant_algo='{parsed.kv_cache_quant_algo}', which is not supported.",
                allowed="Supported: FP8, INT8, null.",
            )
        return parsed

    @property
    def qformat(self) -> QFormat:
        """Our name for it.

        Raises:
            UserError: `quant_algo` is not one of `pipelines.domain.formats`.
        """
        if self.quant_algo not in BY_QUANT_ALGO:
            raise UserError(
                f"The checkpoint has quant_algo='{self.quant_algo}', which is not supported.",
                allowed=f"Supported: {', '.join(str(name) for name in BY_QUANT_ALGO)}.",
            )
        return stored_as(self.quant_algo, self.pre_quant_scale)

    def excludes(self, module: str) -> bool:
        """Return whether a module, e.g. "lm_head" or "transformer.layers.0.mlp.fc", stays in 16 bit."""
        patterns = DEFAULT_EXCLUDED if self.exclude_modules is None else self.exclude_modules
        return any(fnmatchcase(module, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Experts:
    """The `moe` block of a mixture of experts: each layer has a router and equal experts, and no other MLP.

    Attributes:
        chosen: experts that a token goes through.
        renormalized: whether the weights of the chosen experts are divided by their sum.
    """

    count: int
    chosen: int
    renormalized: bool

    @classmethod
    def parse(cls, block: Mapping[str, Any], source: str) -> Self | None:
        """Parse the block; None if it is empty or names no experts.

        Raises:
            UserError: a number is missing, a token goes through more experts than there are, or weights are normalized
                in a way that neither Mixtral nor Qwen3 MoE knows.
        """
        if not block.get("num_experts"):
            return None
        read = _Reader(block, f"{source} moe")
        count, chosen, mode = read.integer("num_experts"), read.integer("top_k"), block.get("normalization_mode", 1)
        if chosen > count or mode not in (0, 1):
            raise UserError(
                f"{source} has moe with num_experts={count}, top_k={chosen}, normalization_mode={shown(mode)}.",
                allowed="top_k may be num_experts at most; normalization_mode 0 (none) or 1 (renormalize).",
            )
        return cls(count, chosen, mode == 1)


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """config.json of a checkpoint; sizes are those of the whole model, not of one rank.

    Attributes:
        architecture: Hugging Face class name, e.g. "LlamaForCausalLM".
        dtype: type of unquantized tensors: "bfloat16", "float16" or "float32".
        hidden_size: residual stream width.
        intermediate_size: width of the gated MLP, or of one expert.
        vocab_size: rows of the embedding (AWQ exports pad it to a multiple of 64).
        max_position_embeddings: longest sequence in tokens.
        hidden_act: "silu", or "gelu", which is the tanh form here; TensorRT-LLM's names.
        rotary_base: RoPE theta.
        rotary_scaling: RoPE scaling block, e.g. Llama 3's, or None.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline-parallel stages.
        moe_ep_size: parts of the tensor-parallel ranks between which the experts of a mixture are divided.
        quantization: how linears and the KV cache are quantized.
        experts: of a mixture; None for a dense model.
        layers: of a MIXED_PRECISION checkpoint: module pattern -> how it is quantized; None if all linears are alike.
        raw: the whole parsed file.
    """

    architecture: str
    dtype: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    hidden_act: str
    rotary_base: float
    rotary_scaling: Mapping[str, Any] | None
    tp_size: int
    pp_size: int
    moe_ep_size: int
    quantization: Quantization
    experts: Experts | None
    layers: Mapping[str, Quantization] | None
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def windows(self) -> tuple[int, ...]:
        """Tokens that each layer attends to, where the checkpoint states it; 0 is all."""
        return windows_of(self.raw, self.num_hidden_layers)

    @property
    def world_size(self) -> int:
        """Number of ranks, one safetensors file each: tp * pp."""
        return self.tp_size * self.pp_size

    @property
    def qformat(self) -> QFormat:
        """Our name for the weight format; `auto` if linears have formats of their own.

        Raises:
            UserError: `quant_algo` is not one of `pipelines.domain.formats`.
        """
        return self.quantization.qformat

    @property
    def qformats(self) -> tuple[QFormat, ...]:
        """Formats that its linears are quantized in; several for MIXED_PRECISION.

        Raises:
            UserError: a `quant_algo` is not one of `pipelines.domain.formats`.
        """
        blocks = (self.quantization,) if self.layers is None else self.layers.values()
        return tuple(sorted({block.qformat for block in blocks}, key=list(QFormat).index))

    def quantization_of(self, module: str) -> Quantization:
        """Return how one linear is quantized, e.g. "lm_head" or "transformer.layers.0.mlp.fc"."""
        if self.layers is None:
            return Quantization() if self.quantization.excludes(module) else self.quantization
        return next((block for name, block in self.layers.items() if fnmatchcase(module, name)), Quantization())

    def format_of(self, module: str) -> FormatSpec:
        """Return the format of one linear.

        Raises:
            UserError: its `quant_algo` is not one of `pipelines.domain.formats`.
        """
        return FORMATS[self.quantization_of(module).qformat]

    @property
    def kv_format(self) -> KvFormat:
        """Our name for the KV-cache format."""
        return _KV_FORMATS[self.quantization.kv_cache_quant_algo]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder`/config.json, and quant_cfg.json where config.json says MIXED_PRECISION.

        Raises:
            UserError: the file is missing, not JSON, or lacks a field.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(
                f"{folder} has no config.json; it is not a TensorRT-LLM checkpoint folder.",
                allowed="A checkpoint folder contains config.json and rank0.safetensors, rank1.safetensors, ...",
            )
        return cls.parse(json_object(path, todo=_AGAIN), str(path), folder)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], source: str = "config.json", folder: Path | None = None) -> Self:
        """Convert a parsed config.json; also accepts `pretrained_config` of an engine folder.

        Args:
            raw: the parsed file.
            source: its name, for messages.
            folder: where quant_cfg.json is, for MIXED_PRECISION.

        Raises:
            UserError: a field is missing, of the wrong type, or contradicts another.
        """
        read = _Reader(raw, source)
        heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
        mapping, quantization = read.block("mapping"), Quantization.parse(read.block("quantization"), source)
        layers = None
        if quantization.quant_algo == MIXED and folder:
            blocks, file = read_layers(folder, quantization.kv_cache_quant_algo), str(folder / LAYERS_FILE)
            layers = {name: Quantization.parse(block, file) for name, block in blocks.items()}
        config = cls(
            architecture=read.text("architecture"),
            dtype=read.text("dtype"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_size=read.integer("head_size", hidden // heads),
            # Qwen's MoE states both
            intermediate_size=read.integer("moe_intermediate_size", read.integer("intermediate_size", 4 * hidden)),
            vocab_size=read.integer("vocab_size"),
            max_position_embeddings=read.integer("max_position_embeddings"),
            norm_epsilon=read.number("norm_epsilon", 1e-5),
            hidden_act=read.text("hidden_act", "gelu"),
            # no default: ModelOpt loses the value under Transformers 5, and a wrong one only shows up as bad text
            rotary_base=read.number("rotary_base"),
            rotary_scaling=read.block("rotary_scaling") or None,
            tp_size=_Reader(mapping, f"{source} mapping").integer("tp_size", 1),
            pp_size=_Reader(mapping, f"{source} mapping").integer("pp_size", 1),
            moe_ep_size=_moe_ep_size(mapping, f"{source} mapping"),
            quantization=quantization,
            experts=Experts.parse(read.block("moe"), source),
            layers=layers,
            raw=raw,
        )
        _check(config, source)
        return config


def _check(config: CheckpointConfig, source: str) -> None:
    """Reject values that contradict each other or that no later step can handle."""
    if config.dtype not in DTYPES:
        raise UserError(f"{source} has dtype='{config.dtype}'.", allowed=f"Allowed: {', '.join(DTYPES)}.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{source} has {config.num_attention_heads} attention heads and {config.num_key_value_heads} KV heads.",
            allowed="The KV heads must divide the attention heads.",
        )
    heads, kv_heads, tp_size = config.num_attention_heads, config.num_key_value_heads, config.tp_size
    if heads % tp_size or (kv_heads % tp_size and tp_size % kv_heads):
        raise UserError(
            f"{source} splits {heads} attention heads and {kv_heads} KV heads over tp_size={tp_size} ranks.",
            allowed="tp_size must divide the attention heads, and divide or be a multiple of the KV heads.",
        )
    mapping = config.raw.get("mapping") or {}
    world, cp_size = mapping.get("world_size", config.world_size), mapping.get("cp_size", 1)
    if world != config.world_size or cp_size != 1:
        raise UserError(
            f"{source} maps world_size={world} to tp_size={config.tp_size}, pp_size={config.pp_size},"
            f" cp_size={cp_size}.",
            allowed="world_size must be tp_size * pp_size, and cp_size 1.",
        )
    if config.moe_ep_size > 1 and (config.experts is None or config.experts.count % config.moe_ep_size):
        count = config.experts.count if config.experts else 0
        raise UserError(
            f"{source} divides {count} experts between moe_ep_size={config.moe_ep_size} groups of ranks.",
            allowed="It must divide the experts of a mixture; of a dense model it is 1.",
        )


def _moe_ep_size(mapping: Mapping[str, Any], source: str) -> int:
    """Return the expert-parallel size: as in TensorRT-LLM's `Mapping`, -1 is unset, and one size implies the other."""
    stated = {name: value for name, value in mapping.items() if value != -1}
    read = _Reader(stated, source)
    tp_size, moe_tp_size = read.integer("tp_size", 1), read.integer("moe_tp_size", 1)
    ep_size = read.integer("moe_ep_size", max(tp_size // moe_tp_size, 1) if "moe_tp_size" in stated else 1)
    if tp_size % ep_size or ("moe_tp_size" in stated and moe_tp_size * ep_size != tp_size):
        raise UserError(
            f"{source} has moe_tp_size={stated.get('moe_tp_size', 'unset')}, moe_ep_size={ep_size} and"
            f" tp_size={tp_size}.",
            allowed="moe_tp_size * moe_ep_size must be tp_size.",
        )
    return ep_size


class _Reader:
    """Typed access to a parsed JSON object; every error names the file, the key and the value."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self._raw, self._source = raw, source

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST_NUMBER:
            raise self._wrong(key, value, "a number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def block(self, key: str) -> Mapping[str, Any]:
        """Return a JSON object; empty if it is absent or null."""
        value = self._raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"{self._source} has no '{key}'; it is not a complete TensorRT-LLM configuration.")
        return value

    def _wrong(self, key: str, value: Any, allowed: str) -> UserError:
        return UserError(f"{self._source} has {key}={shown(value)}.", allowed=f"It must be {allowed}.")
