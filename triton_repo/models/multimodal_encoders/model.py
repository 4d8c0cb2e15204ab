"""Triton model `multimodal_encoders` of the CPU repository: prepared pictures in, rows of the prompt table out.

On a GPU, its place has NVIDIA's code, with the same tensors.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from pipelines.domain.errors import UserError
from pipelines.engines.config import OpenVinoSettings
from pipelines.engines.openvino.serving_options import PREFIX
from pipelines.engines.openvino.vision import VisionEncoder


class TritonPythonModel:
    """Python-backend entry point."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine that `multimodal_model_path` names, a path from the repository."""
        given = {name: each["string_value"] for name, each in json.loads(args["model_config"])["parameters"].items()}
        own = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
        try:
            options = OpenVinoSettings.judged(own, f"Parameter {PREFIX}")
            folder = Path(args["model_repository"]).parent / given["multimodal_model_path"]
            self._encoder = VisionEncoder(folder, options)
        except UserError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        gc.freeze()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer every request; a bad one gets its own error."""
        return [self._respond(request) for request in requests]

    def _respond(self, request: Any) -> Any:
        try:
            tensors = self._outputs({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        except UserError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in tensors.items() if each[0] in wanted])

    def _outputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the table [B, rows, hidden size], the features of all tiles, and its rows [B, 1]."""
        others = sorted(inputs.keys() - {"pixel_values", "max_tokens"})
        if others or "pixel_values" not in inputs:
            what = f"{others[0]} was given" if others else "pixel_values is missing"
            raise UserError(f"{what}.", allowed="This encoder takes pixel_values [tiles, 3, side, side].")
        pixels = inputs["pixel_values"]
        table = np.stack([self._encoder.table(self._encoder.features(tiles)) for tiles in pixels]).astype(np.float16)
        if not np.isfinite(table).all():
            raise UserError("A feature of the picture is too large for float16.")
        size = np.full((len(pixels), 1), table.shape[1], dtype=np.int32)
        return {"OUT_PROMPT_EMBEDDING_TABLE": table, "OUT_PROMPT_VOCAB_SIZE": size}
