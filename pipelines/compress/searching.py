"""Search a format for each linear with ModelOpt's auto_quantize, within a bound on the bits per weight."""

from typing import Any

import torch
from torch.nn import functional

from pipelines.compress import modelopt_door
from pipelines.compress.by_tensor import QuantizeTask
from pipelines.compress.calibration import CalibrationSet, forward_passes, run_batch
from pipelines.compress.config import SEARCH_CAP, QuantSettings
from pipelines.compress.contexts import f32_products
from pipelines.compress.recipes import candidate_configs, kv_cache_config
from pipelines.domain.formats import FORMATS, KvFormat, QFormat
from pipelines.domain.progress import Progress


def search_mix(
    model: torch.nn.Module, task: QuantizeTask, data: CalibrationSet, progress: Progress
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Choose a format for each linear and calibrate it.

    Returns:
        the same model, now simulating the mix, and the record of the search: see `_record`.
    """
    spec, quant = task.spec, task.spec.quant
    assert quant.scoring is not None, "checked by the settings"
    assert quant.scoring_texts is not None, "as well"
    assert quant.effective_bits is not None, "as well"
    per_batch = data.sequences / len(data.batches)
    cap = max(4, round(SEARCH_CAP / per_batch))
    scored = min(len(data.batches), max(1, round(quant.scoring_texts / per_batch)))
    runs = _runs(quant, model, len(data.batches), cap, scored)
    with f32_products():
        with progress.task("searching a format for each linear", runs, "runs") as advance:

            def logits(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
                output = run_batch(model, batch, logits_to_keep=0)
                advance(1)
                return output

            quantized, choices = modelopt_door.search(
                model,
                candidate_configs(spec, task.source.shape.family, modelopt_door.preset),
                [batch.to(task.device) for batch in data.batches],
                logits,
                _loss,
                effective_bits=quant.effective_bits,
                scoring=quant.scoring,
                calibration_steps=cap,
                scoring_steps=scored,
            )
        if spec.kv_cache is not KvFormat.AUTO:
            config = kv_cache_config(spec.kv_cache, modelopt_door.preset)
            modelopt_door.quantize_kv_cache(quantized, config, forward_passes(data, progress, task.device))
    return quantized.eval().requires_grad_(False), _record(quant, sum(map(len, data.batches[:scored])), choices)


def _runs(quant: QuantSettings, model: torch.nn.Module, batches: int, cap: int, scored: int) -> int:
    """Return how often the model will be run: for calibration, for which AWQ needs two passes, and for scores."""
    awq = [FORMATS[qformat].tuning == "awq" for qformat in quant.mixed]
    calibrated = sum(2 * min(batches, cap // 4) if each else min(batches, cap) for each in awq)
    groups = sum(name.endswith(_FIRST) for name, _ in model.named_modules())
    return calibrated + scored * (1 if quant.scoring == "gradient" else 1 + groups * len(quant.mixed))


_FIRST = (".q_proj", ".o_proj", ".gate_proj", ".down_proj")
"""The first of each group of linears that share a format."""


def _loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the next tokens, summed.

    The mean would make scores of about 1e-8, below the tolerance of the solver that ModelOpt gives them to: it then
    takes any mix within the bound for the best one.
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def _record(quant: QuantSettings, texts: int, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the search saw and chose; `effective_bits` are of the layers' linears, without scales of groups."""
    bits = sum(choice["weights"] * FORMATS[QFormat(choice["chosen"])].weights.bits for choice in choices)
    return {
        "candidates": [qformat.value for qformat in quant.mixed],
        "scoring": quant.scoring,
        "texts": texts,
        "asked_bits": quant.effective_bits,
        "effective_bits": round(bits / sum(choice["weights"] for choice in choices), 3),
        "choices": choices,
    }
