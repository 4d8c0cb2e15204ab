"""Fidelity: two engines in, how close the predictions of one are to those of the other out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.fidelity.config import TEXTS as SHIPPED
from eval.fidelity.config import FidelitySettings
from pipelines.compress.config import CalibrationSettings, QuantSettings
from pipelines.domain.formats import FORMATS
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options, options_of_scores
from pipelines.engines.registry import open_engine
from pipelines.stages.quantize import ChatRenderer, calibration_identity, texts_of

if TYPE_CHECKING:
    from eval.fidelity.measure import Side, Windows

TEXTS = {name: f"text.{name}" for name in SHIPPED} | {"calibration": "calibration", "user": "text.user"}
"""Input of the stage by the name of its text."""


@dataclass(frozen=True)
class Fidelity:
    """Engine folder, engine folder of the 16-bit reference, tokenizer and texts in, `fidelity.json` out.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        fidelity: windows, prompts, and whether to compare by layer.
        tokens: predicted tokens of all texts together.
        calibration: where the calibration text is, and how much of it was observed.
        quant: format of the compressed model, which says how to compare weights.
        model: label of the compressed model.
        variant: its compression.
        reference: label of the reference.
        libraries: of the engine.
        needs: packages.
    """

    engine: str
    options: EngineOptions | None
    fidelity: FidelitySettings
    tokens: int
    calibration: CalibrationSettings
    quant: QuantSettings
    model: str
    variant: str
    reference: str
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    name = "fidelity"
    version = "6"
    measures = False

    def identity(self) -> dict[str, Any]:
        """Return what is read, with which arithmetic, and the labels, because they appear in the result."""
        mine = self.fidelity.path  # its suffix decides how it is read, and a file's digest leaves it out
        return {
            "engine": self.engine,
            **options_of_scores(self.options),
            **self.fidelity.model_dump(include={"window", "prompts", "new_tokens", "by_layer"}),
            "tokens": self.tokens,
            "calibration": calibration_identity(self.calibration),
            "model": self.model,
            "variant": self.variant,
            "reference": self.reference,
            **({"file_type": mine.suffix, "column": self.fidelity.column} if mine else {}),
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Load both engines and let them read the same texts."""
        from eval.fidelity.divergence import RESULT, FidelityResult
        from eval.fidelity.measure import check_sides, greedy, layer_errors, measure

        theirs = f"{self.reference} in 16 bit"
        reference = self._side(inputs["reference"], theirs)
        other = self._side(inputs["engine"], f"{self.model} {self.variant}")
        check_sides(reference, other)
        texts = self._texts(inputs, min(reference.session.limits.max_seq_len, other.session.limits.max_seq_len))
        wanted, both = self.fidelity, (reference, other)
        answers = greedy(*both, texts, prompts=wanted.prompts, new_tokens=wanted.new_tokens, progress=progress)
        measured = measure(*both, texts, out_dir, progress)
        scaled = any(FORMATS[qformat].tuning for qformat in self.quant.formats)
        layers = layer_errors(*both, texts, scaled=scaled, progress=progress) if wanted.by_layer else None
        result = FidelityResult(
            model=self.model,
            qformat=self.variant,
            engine=self.engine,
            reference=self.reference,
            arithmetic=measured.arithmetic,
            noise_arithmetic=measured.noise_arithmetic,
            window=len(texts[0].rows[0]),
            vocabulary=reference.session.vocabulary,
            overall=measured.overall,
            noise=measured.noise,
            texts=measured.texts,
            greedy=answers,
            layers=layers,
        )
        result.save(out_dir / RESULT)
        return {name: getattr(result.overall, name) for name in ("kl_mean", "top1_agreement", "tokens")}

    def _side(self, folder: Path, name: str) -> Side:
        """Open an engine, which loads nothing before it is used."""
        from eval.fidelity.measure import Side
        from pipelines.engines.port import LogitsSession

        engine = open_engine(self.engine, **all_options(self.options))
        session = engine.open(folder)
        assert isinstance(session, LogitsSession), "the plan has this stage only for engines that give logits"
        return Side(name, session)

    def _texts(self, inputs: Mapping[str, Path], longest: int) -> list[Windows]:
        """Cut every text into windows that both engines can read."""
        from eval.adapter import load_tokenizer
        from eval.fidelity.measure import refuse_other_tokens

        tokenizer = load_tokenizer(inputs["model"])
        if "reference_model" in inputs:
            other = load_tokenizer(inputs["reference_model"])
            refuse_other_tokens(tokenizer, other, model=self.model, reference=self.reference)
        return windows_of(inputs, self.fidelity, self.tokens, self.calibration, tokenizer, longest)


def windows_of(
    inputs: Mapping[str, Path],
    wanted: FidelitySettings,
    tokens: int,
    calibration: CalibrationSettings,
    tokenizer: Any,
    longest: int,
) -> list[Windows]:
    """Cut every text among the inputs into windows.

    Args:
        inputs: of the stage.
        wanted: window and column.
        tokens: predicted tokens of all texts together.
        calibration: where the calibration text is, and how much of it was observed.
        tokenizer: of the model.
        longest: most tokens of a window that all engines can read.
    """
    from eval.fidelity.measure import cut

    names = [name for name, source in TEXTS.items() if source in inputs]
    length, each = min(wanted.window, longest), -(-tokens // len(names))
    return [
        cut(
            name,
            _source(name, inputs, wanted, calibration),
            tokenizer,
            length=length,
            tokens=each,
            observed=_observed(name, calibration),
        )
        for name in names
    ]


def _observed(name: str, calibration: CalibrationSettings) -> int:
    """Return how many of a text's first rows calibration may have observed."""
    observed = name == "calibration" or (name == "bundled" and calibration.source == "bundled")
    return calibration.size if observed else 0


def _source(
    name: str, inputs: Mapping[str, Path], wanted: FidelitySettings, calibration: CalibrationSettings
) -> Callable[[], Iterable[str]]:
    from pipelines.compress.texts import DEFAULT_COLUMN, load_texts

    if name == "calibration":
        return lambda: texts_of(calibration, inputs)
    column = wanted.column if name == "user" else DEFAULT_COLUMN
    return lambda: load_texts(inputs[TEXTS[name]], column=column, render=ChatRenderer(inputs["model"]))
