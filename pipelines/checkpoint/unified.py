"""Verify and describe a unified Hugging Face checkpoint, which TensorRT-LLM's PyTorch backend and Edge-LLM read.

The layout is that of ModelOpt's `export_hf_checkpoint`: a Hugging Face folder whose linears have scales next to their
weights, plus hf_quant_config.json. Names, dtypes and shapes are as exported by ModelOpt 0.37.0 and 0.47.0 (measured).
Source for the scales that linears share because they are fused when loaded: TensorRT-LLM
`tensorrt_llm/_torch/modules/linear.py`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.checkpoint.tensors import TensorFile, TensorInfo, TensorSpec
from pipelines.checkpoint.verify import Tensors, tensor_faults, value_faults, weight_tensors
from pipelines.domain.adapter import linear_widths
from pipelines.domain.errors import Fault, UserError
from pipelines.domain.formats import BY_QUANT_ALGO, FORMATS, QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.host.files import json_object

QUANT_CONFIG = "hf_quant_config.json"
_AGAIN = "Export the checkpoint again."
_16BIT = ("BF16", "F16")
_ONE = TensorSpec("F32", ())
_NORMS = ("input_layernorm", "post_attention_layernorm")
FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
"""Linears of a layer that TensorRT-LLM computes together."""

PRE_QUANT_SCALE = "pre_quant_scale"
"""Tensor of a linear in ModelOpt's folders; absent where it was folded into the norm or linear before it."""

LEAVES = {
    "weight": "weight",
    "weights_scaling_factor": "weight_scale",
    "weights_scaling_factor_2": "weight_scale_2",
    "activation_scaling_factor": "input_scale",
    "prequant_scaling_factor": PRE_QUANT_SCALE,
}
"""Tensor of a linear in a TensorRT-LLM checkpoint -> its name in ModelOpt's folders."""

_LAYER_PARTS = (".self_attn.", ".mlp.", ".block_sparse_moe.")

MIXED = FORMATS[QFormat.AUTO].quant_algo
ALGORITHMS = tuple(dict.fromkeys(form.quant_algo for form in FORMATS.values() if form.llm_api or form.edge))
"""`quant_algo` of the ModelOpt formats that are exported: TensorRT-LLM's PyTorch backend or Edge-LLM accepts them."""


def fused_with(linear: str) -> tuple[str, ...]:
    """Return the linears that TensorRT-LLM computes together with one, and it itself, by their full names."""
    stem, _, leaf = linear.rpartition(".")
    for group in FUSED:
        leaves = [name.rpartition(".")[2] for name in group]
        if leaf in leaves:
            return tuple(f"{stem}.{each}" for each in leaves)
    return (linear,)


def verify_unified(folder: Path) -> list[Fault]:
    """Read a unified checkpoint back and return everything that is wrong with it; an empty list means it is valid."""
    try:
        config, shape, block = _load(folder)
        files, stored = _files(folder)
    except UserError as error:
        return list(error.faults)
    algo = block.get("quant_algo")
    if algo not in ALGORITHMS:
        accepted = ", ".join(map(str, ALGORITHMS))
        return [Fault(f"{folder / QUANT_CONFIG} has quant_algo='{algo}'.", f"Exported are {accepted}.")]
    expected = expected_tensors(config, shape, block, _dtype(stored))
    needed = {name: spec for name, spec in expected.items() if name in stored or not name.endswith(PRE_QUANT_SCALE)}
    faults = [*tensor_faults(folder, needed, {name: info.spec for name, info in stored.items()})]
    for file in files:
        faults += value_faults(file.path.name, file)
    return faults or [*_fused_faults(shape, files)]


def _load(folder: Path) -> tuple[dict[str, Any], ModelShape, dict[str, Any]]:
    """Return config.json, its model shape, and the quantization block of hf_quant_config.json (empty for 16 bit)."""
    config = _json(folder / "config.json")
    return config, ModelShape.from_hf_config(config, str(folder / "config.json")), quantization_block(folder)


def quantization_block(folder: Path) -> dict[str, Any]:
    """Return what hf_quant_config.json says of a folder's quantization; empty without that file.

    Raises:
        UserError: the file is no JSON, or says nothing of it.
    """
    path = folder / QUANT_CONFIG
    block = _json(path).get("quantization") if path.is_file() else {}
    if not isinstance(block, dict):
        raise UserError(f"{path} has no JSON object 'quantization'.", todo=_AGAIN)
    return block


def quantization_producer(folder: Path) -> dict[str, Any]:
    """Return name and version of what wrote hf_quant_config.json; empty if it does not say."""
    producer = _json(folder / QUANT_CONFIG).get("producer")
    return producer if isinstance(producer, dict) else {}


def _json(path: Path) -> dict[str, Any]:
    try:
        return json_object(path, todo=_AGAIN)
    except FileNotFoundError:
        raise UserError(f"'{path.parent}' has no {path.name}; it is not a Hugging Face checkpoint.") from None


def _files(folder: Path) -> tuple[list[TensorFile], dict[str, TensorInfo]]:
    files = [TensorFile(path) for path in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise UserError(f"'{folder}' has no *.safetensors file.", todo=_AGAIN)
    return files, {name: info for file in files for name, info in file.header.items()}


def _dtype(stored: Mapping[str, TensorInfo]) -> str:
    """Return the dtype of the 16-bit tensors, which is that of the embedding."""
    embedding = stored.get("model.embed_tokens.weight")
    return embedding.dtype if embedding is not None and embedding.dtype in _16BIT else _16BIT[0]


def linear_shapes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return [out, in] of each linear of one layer, by its Hugging Face name."""
    sizes = {name: (out, width) for name, (width, out) in linear_widths(shape).items()}
    (q, hidden), (kv, _), (inner, _) = sizes["q_proj"], sizes["k_proj"], sizes["gate_proj"]
    if shape.family.fused_linears:
        return {
            "self_attn.qkv_proj": (q + 2 * kv, hidden),
            "self_attn.o_proj": sizes["o_proj"],
            "mlp.gate_up_proj": (2 * inner, hidden),
            "mlp.down_proj": sizes["down_proj"],
        }
    usual = ("gate_proj", "up_proj", "down_proj")
    module, names = shape.family.experts or ("mlp", usual)
    places = [f"{module}.experts.{n}" for n in range(shape.num_experts)] if shape.family.experts else [module]
    attention = {f"self_attn.{name}": sizes[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    mlp = [(name, sizes[own]) for name, own in zip(names, usual, strict=True)]
    return attention | {f"{place}.{name}": size for place in places for name, size in mlp}


def expected_tensors(config: Mapping[str, Any], shape: ModelShape, block: Mapping[str, Any], dtype: str) -> Tensors:
    """Return every tensor that the checkpoint should contain; those named pre_quant_scale may be absent.

    Args:
        config: config.json.
        shape: the model's sizes, from config.json.
        block: `quantization` of hf_quant_config.json.
        dtype: type of the 16-bit tensors, in safetensors spelling.
    """
    hidden, head = TensorSpec(dtype, (shape.hidden_size,)), TensorSpec(dtype, (shape.head_dim,))
    table = TensorSpec(dtype, (shape.vocab_size, shape.hidden_size))
    tensors: Tensors = {"model.embed_tokens.weight": table, "model.norm.weight": hidden}
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = table
    for number in range(shape.num_hidden_layers):
        layer = f"model.layers.{number}"
        tensors |= {f"{layer}.{norm}.weight": hidden for norm in (*_NORMS, *shape.family.more_norms)}
        if shape.family.experts:
            router = TensorSpec(dtype, (shape.num_experts, shape.hidden_size))
            tensors[f"{layer}.{shape.family.router}.weight"] = router
        if shape.family.gpt_oss:
            tensors |= {f"{layer}.{name}": tensor for name, tensor in _of_gpt_oss(shape, dtype).items()}
        tensors |= {f"{layer}.self_attn.{norm}.weight": head for norm in shape.family.head_norms.values()}
        for name, (out, width) in linear_shapes(shape).items():
            if shape.family.gpt_oss and name.startswith("mlp."):
                continue
            own = _block_of(f"{layer}.{name}", block)
            tensors |= {f"{layer}.{name}.{leaf}": t for leaf, t in _linear(out, width, own, dtype).items()}
            key = "attention_bias" if name.startswith("self_attn") else "mlp_bias"
            stated = key in shape.family.defaults and shape.family.settled(config)[key]
            if stated or (shape.family.qkv_bias and name in FUSED[0]):
                tensors[f"{layer}.{name}.bias"] = TensorSpec(dtype, (out,))
        if block.get("kv_cache_quant_algo"):
            tensors |= {f"{layer}.self_attn.{kv}_proj.{kv}_scale": _ONE for kv in "kv"}
    return tensors


def _of_gpt_oss(shape: ModelShape, dtype: str) -> Tensors:
    """Return the sinks of a layer and its experts, which are one tensor, in 16 bit or in MXFP4."""
    count, inner, hidden = shape.num_experts, shape.intermediate_size, shape.hidden_size
    tensors = {"self_attn.sinks": (shape.num_attention_heads,), "mlp.router.bias": (count,)}
    found = {name: TensorSpec(dtype, size) for name, size in tensors.items()}
    for name, (out, width) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
        stem = f"mlp.experts.{name}"
        found[f"{stem}_bias"] = TensorSpec(dtype, (count, out))
        if shape.mxfp4:
            found[f"{stem}_blocks"] = TensorSpec("U8", (count, out, width // 32, 16))
            found[f"{stem}_scales"] = TensorSpec("U8", (count, out, width // 32))
        else:
            found[stem] = TensorSpec(dtype, (count, width, out))
    return found


def _block_of(linear: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization block of one linear: the whole block, or its own entry in a mix."""
    own: Mapping[str, Any] = block["quantized_layers"].get(linear, {}) if block.get("quant_algo") == MIXED else block
    return own


def unscaled_inputs(folder: Path) -> tuple[str, dict[str, int]]:
    """Return what a sound folder lacks for TensorRT-LLM's INT4 linears: the 16-bit type, and name -> width.

    Its loader wants a scale of the inputs of each such linear that is not fused with others, and reads none of those
    that are (`W4A16_AWQ_LinearMethod` of 1.3.0rc3 and of main after 1.4.0rc1). AWQ has one, GPTQ has not.
    """
    _, shape, block = _load(folder)
    _, stored = _files(folder)
    alone = {name: width for name, (_, width) in linear_shapes(shape).items() if len(fused_with(name)) == 1}
    names = {f"model.layers.{n}.{name}": width for n in range(shape.num_hidden_layers) for name, width in alone.items()}
    int4 = {name: width for name, width in names.items() if _block_of(name, block).get("quant_algo") == "W4A16_AWQ"}
    scales = {f"{name}.{PRE_QUANT_SCALE}": width for name, width in int4.items()}
    return _dtype(stored), {name: width for name, width in scales.items() if name not in stored}


def _linear(out: int, width: int, block: Mapping[str, Any], dtype: str) -> Tensors:
    form = FORMATS[BY_QUANT_ALGO[block.get("quant_algo")]]
    tensors: Tensors = {}
    for leaf, stored in weight_tensors(form.weights, out, width, dtype, int(block.get("group_size", 128))).items():
        packed = leaf == "weight" and form.weights.pairs_outputs  # U8 here, I8 in a TensorRT-LLM checkpoint
        shape = () if stored.shape == (1,) else stored.shape
        tensors[LEAVES[leaf]] = TensorSpec("U8" if packed else stored.dtype, shape)
    if form.activation != "16bit":
        tensors["input_scale"] = _ONE
    if block.get("pre_quant_scale"):
        tensors[PRE_QUANT_SCALE] = TensorSpec(dtype, (width,))
    return tensors


def _fused_faults(shape: ModelShape, files: list[TensorFile]) -> Iterator[Fault]:
    """Check that linears fused when loaded (q, k, v and gate, up) share one global scale and one input scale."""
    values = {
        name: float(file[name])
        for file in files
        for name in file.header
        if name.endswith((".weight_scale_2", ".input_scale"))
    }
    for number in range(shape.num_hidden_layers):
        for group in FUSED:
            for leaf in ("weight_scale_2", "input_scale"):
                names = [f"model.layers.{number}.{part}.{leaf}" for part in group]
                if len({values.get(name) for name in names}) > 1:
                    pairs = ", ".join(f"{name}={values.get(name)}" for name in names)
                    yield Fault(f"Linears that are fused when loaded differ in {leaf}: {pairs}.", todo=_AGAIN)


def same_vocabulary(target: Path, draft: Path) -> list[Fault]:
    """Check that a draft model has as many tokens as its target; both must be valid checkpoints."""
    ours, theirs = (_load(folder)[1].vocab_size for folder in (target, draft))
    if ours == theirs:
        return []
    return [
        Fault(
            f"The draft model's vocabulary has {theirs} tokens, the model's has {ours}.",
            "Drafts are verified token by token, so both models need the same vocabulary.",
            "Use a draft model of the same family.",
        )
    ]


def describe_unified(folder: Path) -> dict[str, Any]:
    """Return JSON-serializable facts about a valid unified checkpoint.

    Keys: architecture, qformat, quant_algo, kv_cache, dtype, group_size (None where there are no groups),
    num_hidden_layers, files ({name: bytes}), total_bytes (of the weight files), bytes_by_dtype, bits_per_weight (of the
    layers' linears, scales included).
    """
    _, shape, block = _load(folder)
    files, stored = _files(folder)
    by_dtype: Counter[str] = Counter()
    for info in stored.values():
        by_dtype[info.dtype] += info.nbytes
    linears = sum(i.nbytes for name, i in stored.items() if any(part in name for part in _LAYER_PARTS))
    return {
        "architecture": shape.architecture,
        "qformat": BY_QUANT_ALGO[block.get("quant_algo")].value,
        "quant_algo": block.get("quant_algo"),
        "kv_cache": str(block.get("kv_cache_quant_algo") or "auto").lower(),
        "dtype": {"BF16": "bfloat16", "F16": "float16"}[_dtype(stored)],
        "group_size": block.get("group_size"),
        "num_hidden_layers": shape.num_hidden_layers,
        "files": {file.path.name: file.path.stat().st_size for file in files},
        "total_bytes": sum(file.path.stat().st_size for file in files),
        "bytes_by_dtype": dict(sorted(by_dtype.items())),
        "bits_per_weight": round(8 * linears / shape.linear_params, 3),
    }
