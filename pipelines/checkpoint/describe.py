"""Describe a checkpoint: formats, sizes, and which linears are left in 16 bit. Reads headers only."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.checkpoint.config_json import LINEARS, CheckpointConfig
from pipelines.checkpoint.read import Checkpoint
from pipelines.domain.formats import FORMATS, QFormat
from pipelines.domain.units import show_bytes
from pipelines.host.screen import table, wrapped

_16BIT = frozenset({"BF16", "F16", "F32"})
_LINEAR_WEIGHTS = tuple(f"{name}.weight" for name in (*LINEARS, "lm_head"))


def describe(folder: Path) -> dict[str, Any]:
    """Return JSON-serializable facts about a checkpoint folder.

    Keys: architecture, qformat, quant_algo, kv_cache, dtype, group_size (None where there are no groups),
    num_hidden_layers, tp_size, pp_size, files ({name: bytes}), total_bytes (of the rank files), bytes_by_dtype,
    bytes_by_part (linears, scales, embedding and head, norms), linears (how many), linears_16bit (names of those
    left in 16 bit, layer numbers collapsed unless each linear has its own format), formats (of each linear, None if all
    share one), bits_per_weight (of the layers' linears, scales included).

    Raises:
        UserError: the folder is not a readable checkpoint.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    stored = [(name, info.dtype, info.nbytes) for file in checkpoint.ranks for name, info in file.header.items()]
    files = {file.path.name: file.path.stat().st_size for file in checkpoint.ranks}
    by_dtype: Counter[str] = Counter()
    by_part: Counter[str] = Counter()
    for name, dtype, nbytes in stored:
        by_dtype[dtype] += nbytes
        by_part[_part(name)] += nbytes
    return {
        "architecture": config.architecture,
        "qformat": str(config.qformat),
        "quant_algo": config.quantization.quant_algo,
        "formats": _formats(config),
        "kv_cache": str(config.kv_format),
        "dtype": config.dtype,
        "group_size": _group_size(config),
        "num_hidden_layers": config.num_hidden_layers,
        "tp_size": config.tp_size,
        "pp_size": config.pp_size,
        **_linear_facts(checkpoint),
        "bits_per_weight": round(8 * (by_part["linears"] + by_part["scales"]) / _linear_params(config), 3),
        "files": files,
        "total_bytes": sum(files.values()),
        "bytes_by_dtype": dict(sorted(by_dtype.items())),
        "bytes_by_part": dict(sorted(by_part.items())),
    }


def _formats(config: CheckpointConfig) -> dict[str, str] | None:
    """Return the format of every linear of the layers, by module; None if all share one."""
    if config.layers is None:
        return None
    modules = [f"layers.{n}.{name}" for n in range(config.num_hidden_layers) for name in LINEARS]
    return {module: config.quantization_of(f"transformer.{module}").qformat.value for module in modules}


def _group_size(config: CheckpointConfig) -> int | None:
    blocks = (config.quantization,) if config.layers is None else config.layers.values()
    grouped = [block.group_size for block in blocks if FORMATS[block.qformat].weights.group]
    return grouped[0] if grouped else None


def _linear_params(config: CheckpointConfig) -> int:
    q, kv = config.num_attention_heads * config.head_size, config.num_key_value_heads * config.head_size
    per_layer = (q + 2 * kv) * config.hidden_size + q * config.hidden_size
    experts = config.experts.count if config.experts else 1
    return config.num_hidden_layers * (per_layer + 3 * experts * config.hidden_size * config.intermediate_size)


def _linear_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    linears = [name for name in checkpoint if name.endswith(_LINEAR_WEIGHTS)]
    plain = [name for name in linears if checkpoint.dtype(name) in _16BIT]
    alike = checkpoint.config.layers is None
    named = {_collapse(name) if alike else name.removesuffix(".weight").removeprefix("transformer.") for name in plain}
    return {"linears": len(linears), "linears_16bit": sorted(named)}


def _collapse(name: str) -> str:
    """Return a weight's name without its layer number: transformer.layers.3.mlp.fc.weight -> layers.*.mlp.fc."""
    parts = ["*" if part.isdigit() else part for part in name.removesuffix(".weight").split(".")]
    return ".".join(parts).removeprefix("transformer.")


def _part(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in ("lm_head", "transformer.vocab_embedding"):
        return "embedding and head"
    if leaf.endswith(("scaling_factor", "scaling_factor_2", "per_channel_scale", "zero")):
        return "scales"
    if module.endswith(("layernorm", "ln_f")):
        return "norms"
    return "linears"


def left_in_16_bit(qformat: str, linears: Sequence[str]) -> str:
    """Return the linears that a checkpoint holds in 16 bit as text."""
    if qformat in [*QFormat] and FORMATS[QFormat(qformat)].weights.at_build:
        return "all in this checkpoint; the engine build quantizes them"
    return ", ".join(linears) or "none"


def render(facts: dict[str, Any]) -> str:
    """Return the facts of `describe` as lines of plain text."""
    kv = "" if facts["kv_cache"] == "auto" else f", {facts['kv_cache']} KV cache"
    group = f", groups of {facts['group_size']}" if facts["group_size"] else ""
    split = f"tp_size={facts['tp_size']} pp_size={facts['pp_size']}"
    mix = facts["formats"] or {}
    counts = ", ".join(f"{number} {name}" for name, number in sorted(Counter(mix.values()).items()))
    lines = [
        f"{facts['architecture']}, {facts['num_hidden_layers']} layers, {facts['qformat']}{group}{kv}",
        f"  {show_bytes(facts['total_bytes'])} in {len(facts['files'])} rank file(s), {split}",
        f"  {facts['bits_per_weight']:.2f} bits per weight of the layers' linears, scales included",
        *table([(part, show_bytes(size)) for part, size in facts["bytes_by_part"].items()], indent=4),
    ]
    lines += [f"  linears by format: {counts}"] if mix else []
    lines.append(wrapped(f"  left in 16 bit: {left_in_16_bit(facts['qformat'], facts['linears_16bit'])}", 4))
    return "\n".join(lines)
