"""Verify that a checkpoint is what trtllm-build expects: files, configuration, and every tensor of every rank.

Rules: TensorRT-LLM 1.2 `modeling_utils.py`, `quantization/mode.py`, `docs/source/legacy/architecture/checkpoint.md`;
dtypes and shapes of quantized tensors are those that ModelOpt 0.37.0 and 0.47.0 export (measured, identical in both).
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.config_json import LAYERS_FILE, LINEARS, CheckpointConfig, Quantization
from pipelines.checkpoint.tensors import TensorFile, TensorSpec
from pipelines.domain.errors import Fault, UserError, shown
from pipelines.domain.families import BUILT, FAMILIES
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, INT4_WEIGHTS, UNIFORM, UNSMOOTHED, Activation, WeightKind

if TYPE_CHECKING:
    import numpy as np

IMPORTED = "imported"
"""Producer of the checkpoint of a folder that another library quantized."""
_AGAIN = "Export the checkpoint again."
_DTYPE_CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_KV_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")


Tensors = dict[str, TensorSpec]


_ONE, _SCALAR = TensorSpec("F32", (1,)), TensorSpec("F32", ())
_ACTIVATIONS: dict[Activation, Tensors] = {
    "16bit": {},
    "fp8": {"activation_scaling_factor": _ONE},
    "int8": {"activation_scaling_factor": _ONE},
    "fp4": {"activation_scaling_factor": _SCALAR},
}


def weight_tensors(kind: WeightKind, out: int, width: int, dtype: str, group: int) -> Tensors:
    """Return the weight of a linear and its scales, by their names in a TensorRT-LLM checkpoint.

    Args:
        kind: how it is stored.
        out: output channels on this rank.
        width: input channels on this rank.
        dtype: of 16-bit tensors.
        group: input channels that share a scale.
    """
    shape = (out // 2 if kind.pairs_outputs else out, width // 2 if kind.pairs_inputs else width)
    weight = {"weight": TensorSpec(kind.stored or dtype, shape)}
    if kind.stored is None:
        return weight
    scales = (out, width // group) if kind.group else (out,) if kind.scale_per_output else (1,)
    tensors = weight | {"weights_scaling_factor": TensorSpec(kind.scale_type, scales)}
    if kind.second_scale is not None:
        tensors["weights_scaling_factor_2"] = TensorSpec("F32", kind.second_scale)
    return tensors


_ALGORITHMS = {FORMATS[qformat].quant_algo for qformat in UNIFORM}
_FP8_ROWWISE = "FP8_PER_CHANNEL_PER_TOKEN"
"""TensorRT-LLM's own script writes it; none of our formats does."""


def verify(folder: Path) -> list[Fault]:
    """Read a checkpoint back and return everything that is wrong with it; an empty list means it is valid."""
    try:
        config = CheckpointConfig.load(folder)
    except UserError as error:
        return list(error.faults)
    faults = [*_config_faults(config), *_file_faults(folder, config)]
    if faults:
        return faults  # with wrong files or configuration, every tensor would be reported as wrong
    ranks = []
    for rank in range(config.world_size):
        try:
            ranks.append(TensorFile(folder / f"rank{rank}.safetensors"))
        except UserError as error:
            faults += error.faults
    if faults:
        return faults
    for number, file in enumerate(ranks):
        stored = {name: info.spec for name, info in file.header.items()}
        faults += tensor_faults(f"rank{number}.safetensors", expected_tensors(config, number), stored)
    # AutoRound's scales of groups may be negative or 0: nothing is divided by them
    imported = (config.raw.get("producer") or {}).get("name") == IMPORTED
    signed = imported and config.quantization.qformat in UNSMOOTHED.values()
    for number, file in enumerate(ranks):
        faults += value_faults(f"rank{number}.safetensors", file, signed=signed)
    return faults


def _config_faults(config: CheckpointConfig) -> Iterator[Fault]:
    """Yield what TensorRT-LLM would reject or misread in config.json, beyond what parsing it has checked."""
    if config.architecture not in FAMILIES:
        yield Fault(
            f"config.json has architecture='{config.architecture}', which is not supported.",
            f"Supported: {', '.join(BUILT)}.",
        )
    if config.num_hidden_layers % config.pp_size:
        yield Fault(f"pp_size={config.pp_size} does not divide num_hidden_layers={config.num_hidden_layers}.")
    if config.intermediate_size % (ranks := config.tp_size // config.moe_ep_size):
        name = "tp_size" if config.moe_ep_size == 1 else "moe_tp_size"
        yield Fault(f"{name}={ranks} does not divide intermediate_size={config.intermediate_size}.")
    yield from _qwen_faults(config)
    if config.layers is None:
        yield from _block_faults("config.json", "quantization", config.quantization)
        return
    for name, block in config.layers.items():
        yield from _block_faults(LAYERS_FILE, name, block)
    # TensorRT-LLM ignores a pattern that matches no linear, and the linears that it meant stay in 16 bit
    modules = [f"transformer.layers.{n}.{name}" for n in range(config.num_hidden_layers) for name in LINEARS]
    for pattern in config.layers:
        if not any(fnmatchcase(module, pattern) for module in (*modules, "lm_head")):
            yield Fault(f"{LAYERS_FILE} has '{pattern}', which is no linear of this model.", todo=_AGAIN)


def _block_faults(file: str, name: str, block: Quantization) -> Iterator[Fault]:
    """Yield what TensorRT-LLM would reject or misread in how linears are quantized."""
    if block.quant_algo not in {*_ALGORITHMS, _FP8_ROWWISE}:
        algorithms = ", ".join([*dict.fromkeys(str(FORMATS[qformat].quant_algo) for qformat in UNIFORM), _FP8_ROWWISE])
        where = "" if name == "quantization" else f" for {name}"
        yield Fault(
            f"{file} has quant_algo='{block.quant_algo}'{where}, which is not supported.", f"Supported: {algorithms}."
        )
    form = FORMATS[block.qformat] if block.quant_algo in BY_QUANT_ALGO else None
    if form is None:
        return
    if form.tuning == "awq" and not block.pre_quant_scale:
        # TensorRT-LLM divides these scales by that of the activation (`modeling_utils.py`, preprocess_perlayer_weights)
        yield Fault(f"{name} of {block.quant_algo} has pre_quant_scale=False.", "It must be true.", _AGAIN)
    if block.has_zero_point and form.weights is not INT4_WEIGHTS:
        yield Fault(
            f"{name} of {block.quant_algo} has has_zero_point=True.", "Only W4A16_AWQ may have zero points.", _AGAIN
        )
    group = form.weights.group_size(block.group_size)
    if group not in (0, block.group_size):
        yield Fault(f"{name} of {block.quant_algo} has group_size={block.group_size}.", f"It must be {group}.")


def _qwen_faults(config: CheckpointConfig) -> Iterator[Fault]:
    """Yield keys that TensorRT-LLM's Qwen reads without a default: it would stop with an AttributeError."""
    family = FAMILIES.get(config.architecture)
    if family is None or not family.qwen_type:
        return
    kind, length = config.raw.get("qwen_type"), config.raw.get("seq_length")
    if kind != family.name:
        yield Fault(f"config.json has qwen_type={shown(kind)}.", f"It must be '{family.name}'.", _AGAIN)
    if not isinstance(length, int) or length < 1:
        yield Fault(f"config.json has seq_length={shown(length)}.", "It must be a positive integer.", _AGAIN)
    if family.qkv_bias and not config.raw.get("attn_bias", True):
        yield Fault("config.json has attn_bias=false.", f"{family.title} has a bias in q, k and v.", _AGAIN)


def _file_faults(folder: Path, config: CheckpointConfig) -> Iterator[Fault]:
    expected = {f"rank{rank}.safetensors" for rank in range(config.world_size)}
    present = {path.name for path in folder.iterdir() if re.fullmatch(r"rank\d+\.safetensors", path.name)}
    for name in sorted(expected - present):
        yield Fault(f"{folder / name} is missing; config.json says world_size={config.world_size}.", todo=_AGAIN)
    for name in sorted(present - expected):
        yield Fault(f"{folder / name} is unexpected; config.json says world_size={config.world_size}.", todo=_AGAIN)
    if config.layers is None and (folder / LAYERS_FILE).exists():
        yield Fault(
            f"{folder / LAYERS_FILE} is only valid for MIXED_PRECISION; quant_algo is"
            f" {config.quantization.quant_algo}.",
            todo="Remove the file.",
        )


def tensor_faults(place: object, expected: Tensors, stored: Mapping[str, TensorSpec]) -> Iterator[Fault]:
    """Yield what a file or folder lacks, what it has more, and what is of another type or shape."""
    for name in sorted(expected.keys() - stored.keys()):
        yield Fault(f"{place} lacks '{name}'.", f"Expected: {expected[name]}.", _AGAIN)
    for name in sorted(stored.keys() - expected.keys()):
        yield Fault(f"{place} contains the unexpected tensor '{name}'.", todo=_AGAIN)
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != expected[name]:
            yield Fault(f"{place}: '{name}' is {stored[name]}.", f"Expected: {expected[name]}.", _AGAIN)


def expected_tensors(config: CheckpointConfig, rank: int) -> Tensors:
    """Return every tensor that one rank file should contain.

    rank = pp_rank * tp_size + tp_rank; layers are numbered from 0 in each stage.
    """
    stage, dtype = rank // config.tp_size, _DTYPE_CODES[config.dtype]
    vocab_rows = -(-config.vocab_size // config.tp_size)  # rounded up, because exports pad the vocabulary
    tensors: Tensors = {}
    if stage == 0:
        rows = vocab_rows if config.raw.get("use_parallel_embedding") else config.vocab_size
        tensors["transformer.vocab_embedding.weight"] = TensorSpec(dtype, (rows, config.hidden_size))
    layers = config.num_hidden_layers // config.pp_size
    for number in range(layers):
        here, everywhere = f"transformer.layers.{number}", f"transformer.layers.{stage * layers + number}"
        tensors |= {f"{here}.{name}": tensor for name, tensor in layer_tensors(config, everywhere).items()}
    if stage == config.pp_size - 1:
        tensors["transformer.ln_f.weight"] = TensorSpec(dtype, (config.hidden_size,))
        if not FAMILIES[config.architecture].head_is_embedding:
            tensors |= _linear_tensors(config, "lm_head", "lm_head", vocab_rows, config.hidden_size)
    return tensors


def layer_tensors(config: CheckpointConfig, path: str) -> Tensors:
    """Return a layer's tensors on one rank, by name within the layer; `path` is the layer in the whole model."""
    hidden, tp_size, dtype = config.hidden_size, config.tp_size, _DTYPE_CODES[config.dtype]
    q_rows = config.num_attention_heads // tp_size * config.head_size
    kv_rows = max(config.num_key_value_heads // tp_size, 1) * config.head_size
    inner = config.intermediate_size // (tp_size // config.moe_ep_size)
    linears = {"attention.qkv": (q_rows + 2 * kv_rows, hidden), "attention.dense": (hidden, q_rows)}
    family = FAMILIES[config.architecture]
    if family.fused_linears:  # up and gate
        linears |= {"mlp.fc": (2 * inner, hidden), "mlp.proj": (hidden, inner)}
    elif config.experts is None:
        linears |= {"mlp.fc": (inner, hidden), "mlp.gate": (inner, hidden), "mlp.proj": (hidden, inner)}
    tensors = {f"{norm}.weight": TensorSpec(dtype, (hidden,)) for norm in family.layer_norms}
    tensors |= {f"attention.{norm}.weight": TensorSpec(dtype, (config.head_size,)) for norm in family.head_norms}
    for name, (out, width) in linears.items():
        tensors |= _linear_tensors(config, name, f"{path}.{name}", out, width)
        if has_bias(config, name):
            tensors[f"{name}.bias"] = TensorSpec(dtype, (out,))
    if config.experts is not None:
        count = config.experts.count
        own = count // config.moe_ep_size
        tensors["mlp.router.weight"] = TensorSpec("F32", (count, hidden))
        if family.gpt_oss:
            tensors["attention.sinks"] = TensorSpec(dtype, (config.num_attention_heads,))
            tensors["mlp.router.bias"] = TensorSpec("F32", (count,))
            tensors["mlp.fc.bias"] = TensorSpec(dtype, (count, 2 * inner))
            tensors["mlp.proj.bias"] = TensorSpec(dtype, (count, hidden))
        # up and gate are one, as TensorRT-LLM's plugin reads them
        for name, (out, width) in {"mlp.fc": (2 * inner, hidden), "mlp.proj": (hidden, inner)}.items():
            for leaf, tensor in _linear_tensors(config, name, f"{path}.{name}", out, width).items():
                shared = leaf.endswith("activation_scaling_factor")  # by all experts
                tensors[leaf] = tensor if shared else TensorSpec(tensor.dtype, (own, *tensor.shape))
    if config.quantization.kv_cache_quant_algo:
        tensors |= {f"attention.{name}": TensorSpec("F32", (1,)) for name in _KV_SCALES}
    return tensors


def has_bias(config: CheckpointConfig, linear: str) -> bool:
    """Return whether a linear of a layer, e.g. "attention.dense", has a bias.

    Qwen2's `attn_bias` is that of q, k and v alone (TensorRT-LLM `models/qwen/model.py`: dense_bias=False).
    """
    if not linear.startswith("attention"):
        return bool(config.raw.get("mlp_bias"))
    whole = not FAMILIES[config.architecture].qkv_bias or linear == "attention.qkv"
    return whole and bool(config.raw.get("attn_bias"))


def _linear_tensors(config: CheckpointConfig, name: str, path: str, out: int, width: int) -> Tensors:
    block, dtype = config.quantization_of(path), _DTYPE_CODES[config.dtype]
    if block.quant_algo == _FP8_ROWWISE:
        tensors = {"weight": TensorSpec("F8_E4M3", (out, width)), "per_channel_scale": TensorSpec("F32", (out,))}
    else:
        form = FORMATS[block.qformat]
        tensors = weight_tensors(form.weights, out, width, dtype, block.group_size) | _ACTIVATIONS[form.activation]
        if form.tuning:
            tensors["prequant_scaling_factor"] = TensorSpec(dtype, (width,))
    if block.has_zero_point:
        tensors["zero"] = TensorSpec(dtype, (width // block.group_size, out))
    return {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}


_SCALE = re.compile(r"scaling_factor[^.]*$|_scale(_2)?$")


def value_faults(file: str, tensors: TensorFile, *, signed: bool = False) -> Iterator[Fault]:
    """Yield wrong values: NaN or infinity anywhere, scales that are not positive, and inconsistent KV scales.

    Args:
        file: name of the file, for messages.
        tensors: its content.
        signed: whether scales of weights may have any sign.
    """
    for name, info in tensors.header.items():
        if info.dtype in _NOT_FINITE and _any_not_finite(tensors[name], info.dtype):
            yield Fault(f"{file}: '{name}' contains NaN or infinity.", todo=_AGAIN)
        elif _SCALE.search(name) and not (signed and name.endswith(".weights_scaling_factor")):
            # an NVFP4 block of zeros has the scale 0; every other scale is a divisor
            smallest, blocks = float(tensors[name].astype("float32").min()), info.dtype == "F8_E4M3"
            if smallest < 0 or (smallest == 0 and not blocks):
                yield Fault(
                    f"{file}: the scale '{name}' has the value {smallest:g}.", "Scales must be positive.", _AGAIN
                )
        if name.endswith(".kv_cache_scaling_factor"):
            yield from _kv_faults(file, tensors, name.rpartition(".")[0])


def _kv_faults(file: str, tensors: TensorFile, module: str) -> Iterator[Fault]:
    names = [f"{module}.{name}" for name in _KV_SCALES]
    if all(name in tensors.header for name in names):
        both, key, value = (float(tensors[name].astype("float32").max()) for name in names)
        if both != max(key, value):
            yield Fault(
                f"{file}: '{names[0]}' is {both:g}, the scales of K and V are {key:g} and {value:g}.",
                "It must be the larger of the two.",
                _AGAIN,
            )


_NOT_FINITE = {"BF16": ("u2", 0x7F80), "F16": ("u2", 0x7C00), "F32": ("u4", 0x7F800000), "F8_E4M3": ("u1", 0x7F)}
"""dtype -> (unsigned type of the same size, bits that are all set only in NaN and infinity)."""

_CHUNK = 1 << 24  # elements checked at a time, which keeps temporaries below 100 MiB


def _any_not_finite(array: "np.ndarray[Any, Any]", dtype: str) -> bool:
    unsigned, bits = _NOT_FINITE[dtype]
    flat = array.reshape(-1).view(unsigned)
    return any(((flat[at : at + _CHUNK] & bits) == bits).any() for at in range(0, flat.size, _CHUNK))
