"""Search a format for each linear with ModelOpt's auto_quantize, within a bound on the bits per weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from pipelines.compress import modelopt_door
from pipelines.compress.calibration import CalibrationSet, forward_passes, run_batch
from pipelines.compress.f32_products import f32_products
from pipelines.compress.recipes import candidate_configs, kv_cache_config
from pipelines.compress.specs import SEARCH_CAP, QuantSpec, SearchSpec
from pipelines.domain.families import Family
from pipelines.domain.formats import FORMATS, KvFormat
from pipelines.domain.progress import Progress


def search_mix(
    model: torch.nn.Module, spec: QuantSpec, family: Family, data: CalibrationSet, progress: Progress, device: str
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Choose a format for each linear and calibrate it.

    Returns:
        the same model, now simulating the mix, and the record of the search: see `_record`.
    """
    assert spec.search is not None
    per_batch = data.sequences / len(data.batches)
    with f32_products():
        quantized, choices = modelopt_door.search(
            model,
            candidate_configs(spec, family, modelopt_door.preset),
            _Batches(data, progress, device),
            lambda model, batch: run_batch(model, batch, logits_to_keep=0),
            _loss,
            effective_bits=spec.search.effective_bits,
            scoring=spec.search.scoring,
            calibration_steps=max(4, round(SEARCH_CAP / per_batch)),
            scoring_steps=min(len(data.batches), max(1, round(spec.search.texts / per_batch))),
        )
        if spec.kv_cache is not KvFormat.AUTO:
            config = kv_cache_config(spec.kv_cache, modelopt_door.preset)
            modelopt_door.quantize_kv_cache(quantized, config, forward_passes(data, progress, device))
    return quantized.eval().requires_grad_(False), _record(spec.search, choices)


class _Batches:
    """The batches that ModelOpt reads, with progress; every iteration is one pass."""

    def __init__(self, data: CalibrationSet, progress: Progress, device: str) -> None:
        self._data, self._progress, self._device = data, progress, device
        self._passes = itertools.count(1)

    def __iter__(self) -> Iterator[torch.Tensor]:
        # ModelOpt calibrates without gradients; it scores with gradients, or in inference mode
        scoring = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        title = "judging the candidates" if scoring else f"calibrating the candidates, pass {next(self._passes)}"
        with self._progress.task(title, None, "batches") as advance:
            for batch in self._data.batches:
                yield batch.to(self._device)
                advance(1)


def _loss(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return the cross entropy of the next tokens, summed.

    The mean would make scores of about 1e-8, below the tolerance of the solver that ModelOpt gives them to: it then
    takes any mix within the bound for the best one.
    """
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum")


def _record(search: SearchSpec, choices: list[modelopt_door.Choice]) -> dict[str, Any]:
    """Return what the search saw and chose, JSON-serializable.

    Keys: candidates, scoring, texts, asked_bits, effective_bits (of the linears of the layers, without scales of
    groups), choices: for each group of linears that share a format its `linears`, `chosen`, `weights`, `scores`.
    """
    bits = sum(choice.weights * FORMATS[choice.chosen].weights.bits for choice in choices)
    return {
        "candidates": [qformat.value for qformat in search.candidates],
        "scoring": search.scoring,
        "texts": search.texts,
        "asked_bits": search.effective_bits,
        "effective_bits": round(bits / sum(choice.weights for choice in choices), 3),
        "choices": [
            {
                "linears": list(choice.linears),
                "chosen": choice.chosen.value,
                "weights": choice.weights,
                "scores": {qformat.value: score for qformat, score in choice.scores.items()},
            }
            for choice in choices
        ],
    }
