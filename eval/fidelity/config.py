"""The group `fidelity`: what the compressed model and the 16-bit model read, to compare their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipelines.settings.base import Group, Positive
from pipelines.settings.model import BUNDLED, ModelSettings

REAL = ("prose", "dialogue", "code", "languages")
TEXTS = {"bundled": BUNDLED / "corpus.jsonl"} | {
    name: BUNDLED / "texts" / "fidelity" / f"{name}.jsonl" for name in REAL
}
"""Texts that ship with the project, by name."""

ALONE, AMONG_OTHERS = 32_768, 4_096
"""Predicted tokens where none are given: of `make fidelity`, and as a part of other commands."""


class FidelitySettings(Group):
    """Texts and tokens of the comparison with the 16-bit model.

    Attributes:
        texts: texts to read. `prose`, `dialogue`, `code` and `languages` are real text that ships with the project,
            `bundled` is about the bundled models' synthetic domain, `calibration` is the text of calibration=..., left
            out beside shipped text where it ships too. null is `bundled` and `calibration` for a bundled model, and
            the five others for any other model.
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

    texts: tuple[Literal["bundled", "prose", "dialogue", "code", "languages", "calibration"], ...] | None = None
    path: Path | None = None
    column: str = "text"
    tokens: Positive | None = None
    window: Annotated[int, Field(ge=2, le=2**20)] = 512
    prompts: Positive = 16
    new_tokens: Positive = 64
    top_logprobs: Annotated[int, Field(ge=1, le=2**20)] = 20
    by_layer: bool = False
    reference_path: Path | None = None

    @property
    def shipped(self) -> dict[str, Path]:
        """The texts to read that ship with the project, by name."""
        return {name: TEXTS[name] for name in self.texts or () if name in TEXTS}

    def for_model(self, model: ModelSettings) -> FidelitySettings:
        """Return the settings with the texts that null stands for."""
        chosen = ("bundled", "calibration") if model.is_bundled else (*REAL, "calibration")
        return self.model_copy(update={"texts": chosen}) if self.texts is None else self

    @model_validator(mode="after")
    def _has_text(self) -> FidelitySettings:
        if self.texts == () and self.path is None:
            raise ValueError("has no text: give fidelity.texts=[prose,code], or a file with fidelity.path=...")
        return self
