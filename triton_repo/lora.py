"""Convert a peft LoRA adapter to the two arrays that TensorRT-LLM's Triton backend reads.

Source: TensorRT-LLM `examples/hf_lora_convert.py` @05316d3 (layout, scaling) and `tensorrt_llm/lora_manager.py` (module
ids). `model.lora_weights.npy` is [1, rows, width]: a row holds A [rank, inputs] and then B [outputs, rank] times the
adapter's scaling, both flattened, and zeros up to the widest row. `model.lora_config.npy` is int32 [1, rows, 3]: module
id, layer, rank; rank and scaling may differ by row. Rows are sorted by layer and module here; each identifies itself,
so their order does not matter. A tensor that the script does not know is skipped there with a line of output, and
refused here, because the adapter would silently answer differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.checkpoint import adapter_files
from pipelines.checkpoint.adapter_files import AdapterFiles, place
from pipelines.domain.adapter import MODULES
from pipelines.domain.errors import Fault, UserError
from pipelines.engines.limits import EngineLimits

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WEIGHTS, CONFIG = "model.lora_weights.npy", "model.lora_config.npy"
PEFT_FILES = (adapter_files.CONFIG, adapter_files.WEIGHTS)
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

    files = AdapterFiles.read(folder)
    rows, keys = [], []
    order = {name: MODULE_IDS[module] for name, module in MODULES.items()}
    places = {module: place(module) for module in files.scalings}
    ids = {module: (layer, order[name.partition(".")[2]]) for module, (layer, name) in places.items()}
    for module, (layer, number) in sorted(ids.items(), key=lambda item: item[1]):
        inside, outside = files.matrices(module)
        rows.append(np.concatenate([inside.reshape(-1), outside.reshape(-1)]))
        keys.append([number, layer, len(inside)])
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


def check_values(adapters: Mapping[int, Path]) -> None:
    """Read every matrix of adapters that are served as they are.

    Raises:
        UserError: see `AdapterFiles`.
    """
    for folder in adapters.values():
        files = AdapterFiles.read(folder)
        for module in files.scalings:
            files.matrices(module)


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
