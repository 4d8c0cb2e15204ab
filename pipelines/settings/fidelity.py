"""The group `fidelity`: what the compressed model and the 16-bit model read, to compare their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines.settings.base import Group, Positive

ALONE, AMONG_OTHERS = 32_768, 4_096
"""Predicted tokens where none are given: of `make fidelity`, and as a part of other commands."""


class FidelitySettings(Group):
    """Texts and tokens of the comparison with the 16-bit model.

    Attributes:
        texts: texts to read: `bundled` ships with the project, `calibration` is the text of calibration=...; the two
            are one with calibration=bundled.
        path: a text of yours to read as well: a file (.txt, .jsonl, .json, .csv, .parquet) or a folder of such files.
        column: field of a row that holds the text, in a file with rows.
        tokens: tokens to predict, shared evenly by the texts; null is 32,768, and 4,096 within `all`,
            `compare` and `evaluate`.
        window: tokens that are read together, the first of which is not predicted.
        prompts: beginnings of the texts that both continue greedily.
        new_tokens: most tokens of such a continuation.
        top_logprobs: tokens whose log probabilities a server (eval.url) is asked for at each position; vLLM gives 20
            unless told otherwise, the service here at most 20. Without a server it has no effect.
        by_layer: compare the outputs of all blocks and the weights of all linears as well.
        reference_path: folder of another Hugging Face model to compare with in 16 bit, with the same tokenizer; null
            is the model itself.
    """

    texts: tuple[Literal["bundled", "calibration"], ...] = ("bundled", "calibration")
    path: Path | None = None
    column: str = "text"
    tokens: Positive | None = None
    window: Annotated[int, Field(ge=2, le=2**20)] = 512
    prompts: Positive = 16
    new_tokens: Positive = 64
    top_logprobs: Annotated[int, Field(ge=1, le=2**20)] = 20
    by_layer: bool = False
    reference_path: Path | None = None

    @model_validator(mode="after")
    def _has_text(self) -> FidelitySettings:
        if not self.texts and self.path is None:
            raise ValueError("has no text: give fidelity.texts=[bundled], or a file with fidelity.path=...")
        return self
