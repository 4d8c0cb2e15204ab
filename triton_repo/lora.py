"""Convert a peft LoRA adapter to the two arrays that TensorRT-LLM's Triton backend reads.

Source: TensorRT-LLM `examples/hf_lora_convert.py` @05316d3 (layout, scaling) and `tensorrt_llm/lora_manager.py` (module
ids). `model.lora_weights.npy` is [1, rows, width]: a row holds A [rank, inputs] and then B [outputs, rank] times the
adapter's scaling, both flattened, and zeros up to the widest row. `model.lora_config.npy` is int32 [1, rows, 3]: module
id, layer, rank. Rows are sorted by layer and module here; each identifies itself, so their order does not matter. A
tensor that the script does not know is skipped there with a line of output, and refused here, because the adapter would
silently answer differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint.tensors import TensorFile
from pipelines.domain.adapter import MODULES
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.limits import EngineLimits

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")
MODULE_IDS = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
}
STORED = ("float16", "float32")
"""Engine types whose adapters can be stored: `runtime/utils/numpyUtils.cpp` reads no bfloat16 from a .npy file, and
`runtime/loraUtils.cpp` takes weights of the engine's own type only."""

_TENSOR = re.compile(r".*\.layers\.(\d+)\.(?:self_attn|mlp)\.([a-z_]+)\.lora_(A|B)\.weight")
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Keys of adapter_config.json -> the values that this layout can represent."""

Pairs = dict[tuple[int, str], dict[str, "Array"]]
"""(layer, Hugging Face's name of the linear) -> {"A": [rank, inputs], "B": [outputs, rank]}."""


def convert(folder: Path, dtype: str = "float16") -> tuple[Array, Array]:
    """Read an adapter.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors, as peft saves them.
        dtype: of the converted weights, "float16" or "float32".

    Returns:
        weights [1, rows, width] and config [1, rows, 3].

    Raises:
        UserError: it is not a LoRA adapter, or has more than LoRA matrices of linears.
    """
    import numpy as np

    config = _config(folder)
    scale = _scaling(config)
    rows, keys = [], []
    order = {name: MODULE_IDS[module] for name, module in MODULES.items()}
    for (layer, name), pair in sorted(_pairs(folder).items(), key=lambda item: (item[0][0], order[item[0][1]])):
        inside, outside = pair["A"].astype(np.float32), pair["B"].astype(np.float32) * scale
        rows.append(np.concatenate([inside.reshape(-1), outside.reshape(-1)]))
        keys.append([order[name], layer, inside.shape[0]])
    weights = np.zeros((1, len(rows), max(len(row) for row in rows)), dtype=dtype)
    for number, row in enumerate(rows):
        weights[0, number, : len(row)] = row
    if not np.isfinite(weights).all():
        raise UserError(f"The adapter '{folder}' holds values that {dtype} cannot hold.", todo="Train it again.")
    return weights, np.array([keys], dtype=np.int32)


def write(folder: Path, out_dir: Path, dtype: str) -> None:
    """Convert an adapter into two files."""
    import numpy as np

    weights, config = convert(folder, dtype)
    out_dir.mkdir(parents=True, exist_ok=True)
    np.save(out_dir / WEIGHTS, weights)
    np.save(out_dir / CONFIG, config)


def adapter_faults(adapters: Mapping[int, Path], limits: EngineLimits) -> list[Fault]:
    """Find adapters that the GPU engine cannot serve."""
    faults = []
    if adapters and limits.dtype not in STORED:
        faults.append(
            Fault(
                f"The engine computes in {limits.dtype}; an adapter must have the engine's type, and a .npy file of "
                f"{limits.dtype} cannot be read.",
                f"LoRA is served by engines of {' and '.join(STORED)}.",
                "Build the engine from a float16 checkpoint: quant.dtype=float16",
            )
        )
    if adapters and not limits.lora_modules:
        faults.append(
            Fault(
                "lora.adapters are given; the engine was built without the LoRA plugin.",
                todo="Build it with lora=adapters.",
            )
        )
        return faults
    for task, folder in adapters.items():
        _, config = convert(folder, "float32")
        rank, ids = int(config[..., 2].max()), {int(number) for number in config[..., 0].reshape(-1)}
        if rank > limits.max_lora_rank:
            faults.append(
                Fault(
                    f"lora.adapters.{task}='{folder}' has rank {rank}; the engine was built for "
                    f"{limits.max_lora_rank}.",
                    todo=f"Build it with lora.max_rank={rank}.",
                )
            )
        missing = [name for name, number in MODULE_IDS.items() if number in ids and name not in limits.lora_modules]
        if missing:
            faults.append(
                Fault(
                    f"lora.adapters.{task}='{folder}' changes {', '.join(missing)}; the engine was built for "
                    f"{', '.join(limits.lora_modules)}.",
                    todo="Build it with these in lora.target_modules.",
                )
            )
    return faults


def _config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of a plain LoRA adapter."""
    path = folder / PEFT_FILES[0]
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"'{folder}' is not an adapter: it has no {path.name}.",
            allowed=f"peft saves {' and '.join(PEFT_FILES)}.",
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if faults := [
        _more_than_lora(path, key, config[key]) for key, v in _PLAIN.items() if config.get(key, v[0]) not in v
    ]:
        raise UserError.of(faults)
    return config


def _more_than_lora(path: Path, key: str, value: Any) -> Fault:
    return Fault(
        f"{path} has {key}={value!r}, which TensorRT-LLM's two arrays have no place for.",
        "They hold LoRA matrices of linears under one rank and one alpha.",
        "Train the adapter without it, or merge it into the model.",
    )


def _scaling(config: Mapping[str, Any]) -> float:
    """Return the factor of B: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)


def _pairs(folder: Path) -> Pairs:
    """Return the matrices of every linear, after checking that both exist and match."""
    path = folder / PEFT_FILES[1]
    pairs: Pairs = {}
    file = TensorFile(path)
    for name in file:
        found = _TENSOR.fullmatch(name)
        if found is None or found[2] not in MODULES:
            raise UserError(
                f"{path} holds '{name}', which is no LoRA matrix of a known linear.",
                allowed=f"Known: {', '.join(MODULES)} of self_attn and mlp.",
            )
        pairs.setdefault((int(found[1]), found[2]), {})[found[3]] = file[name]
    if not pairs:
        raise UserError(f"{path} holds no tensors.")
    for (layer, name), pair in pairs.items():
        if set(pair) != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = ", ".join(f"{half} {list(values.shape)}" for half, values in sorted(pair.items()))
            raise UserError(
                f"{path}: {name} of layer {layer} has {shapes}.", allowed="A is [rank, inputs], B is [outputs, rank]."
            )
    return pairs
