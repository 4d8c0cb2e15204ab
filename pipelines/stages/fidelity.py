"""Fidelity: two engines in, how close the predictions of one are to those of the other out."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.config import SHIPPED_TEXTS, EvalSettings, FidelitySettings
from pipelines.compress.config import CalibrationSettings, QuantSettings
from pipelines.compress.texts import DEFAULT_COLUMN, load_texts
from pipelines.domain.formats import FORMATS
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options, options_of_scores
from pipelines.engines.port import LogitsSession
from pipelines.engines.registry import open_engine
from pipelines.stages.evaluate import server_of
from pipelines.stages.quantize import ChatRenderer, calibration_identity, texts_of

if TYPE_CHECKING:
    from eval.fidelity.measure import Side, Windows


TEXTS = {name: f"text.{name}" for name in SHIPPED_TEXTS} | {"calibration": "calibration", "user": "text.user"}
"""Input of the stage by the name of its text."""


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Texts that an engine reads, so that its predictions can be compared.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        fidelity: windows, and what is compared.
        tokens: predicted tokens of all texts together.
        calibration: where the calibration text is, and how much of it was observed.
    """

    engine: str
    options: EngineOptions | None
    fidelity: FidelitySettings
    tokens: int
    calibration: CalibrationSettings
    model: str
    libraries: tuple[str, ...]
    needs: tuple[str, ...]

    def _read(self, settings: set[str]) -> dict[str, Any]:
        """Return what identifies the texts that are read, and the arithmetic that reads them."""
        mine = self.fidelity.path  # its suffix decides how it is read, and a file's digest leaves it out
        return {
            "engine": self.engine,
            **options_of_scores(self.options),
            **self.fidelity.model_dump(include=settings),
            "tokens": self.tokens,
            "calibration": calibration_identity(self.calibration),
            "model": self.model,
            **({"file_type": mine.suffix, "column": self.fidelity.column} if mine else {}),
        }

    def _side(self, folder: Path, name: str) -> "Side":
        """Open an engine, which loads nothing before it is used."""
        from eval.fidelity.measure import Side

        session = open_engine(self.engine, **all_options(self.options)).open(folder)
        assert isinstance(session, LogitsSession), "the plan has this stage only for engines that give logits"
        return Side(name, session)

    def _windows(self, inputs: Mapping[str, Path], longest: int) -> "list[Windows]":
        """Cut every text among the inputs into windows of at most so many tokens."""
        from eval.adapter import load_tokenizer
        from eval.fidelity.measure import cut

        tokenizer, names = load_tokenizer(inputs["model"]), [name for name, source in TEXTS.items() if source in inputs]
        length, each = min(self.fidelity.window, longest), -(-self.tokens // len(names))
        windows = []
        for name in names:
            # calibration may have observed the first rows of its text
            observed = name == "calibration" or (name == "bundled" and self.calibration.source == "bundled")
            source, count = self._source(name, inputs), self.calibration.size if observed else 0
            windows.append(cut(name, source, tokenizer, length=length, tokens=each, observed=count))
        return windows

    def _source(self, name: str, inputs: Mapping[str, Path]) -> Callable[[], Iterable[str]]:
        if name == "calibration":
            return lambda: texts_of(self.calibration, inputs)
        column = self.fidelity.column if name == "user" else DEFAULT_COLUMN
        return lambda: load_texts(inputs[TEXTS[name]], column=column, render=ChatRenderer(inputs["model"]))


@dataclass(frozen=True, kw_only=True)
class Fidelity(_Reading):
    """Engine folder, engine folder of the 16-bit reference, tokenizer and texts in, `fidelity.json` out.

    Attributes:
        quant: format of the compressed model, which says how to compare weights.
    """

    quant: QuantSettings
    variant: str
    reference: str
    name = "fidelity"
    version = "6"
    measures = False
    writes = "fidelity"

    def identity(self) -> dict[str, Any]:
        """Return what is read, with which arithmetic, and the labels, because they appear in the result."""
        return {
            **self._read({"window", "prompts", "new_tokens", "by_layer"}),
            "variant": self.variant,
            "reference": self.reference,
        }

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        return f"mean KL {facts['kl_mean']:.2g}, top-1 {100 * facts['top1_agreement']:.2f} %"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Load both engines and let them read the same texts."""
        from eval.fidelity.measure import check_sides, greedy, layer_errors, measure

        theirs = f"{self.reference} in 16 bit"
        reference = self._side(inputs["reference"], theirs)
        other = self._side(inputs["engine"], f"{self.model} {self.variant}")
        check_sides(reference, other)
        longest = min(side.session.limits.max_seq_len for side in (reference, other))  # windows that both can read
        self._refuse_other_tokens(inputs)
        texts = self._windows(inputs, longest)
        settings, both = self.fidelity, (reference, other)
        answers = greedy(*both, texts, prompts=settings.prompts, new_tokens=settings.new_tokens, progress=progress)
        labels = {"model": self.model, "qformat": self.variant, "engine": self.engine, "reference": self.reference}
        result = measure(reference, other, texts, out_dir, progress, **labels, greedy=answers, layers=None)
        if settings.by_layer:
            scaled = any(FORMATS[qformat].tuning for qformat in self.quant.formats)
            result = replace(result, layers=layer_errors(*both, texts, scaled=scaled, progress=progress))
        result.save(out_dir / result.FILE)
        return {name: getattr(result.overall, name) for name in ("kl_mean", "top1_agreement", "tokens")}

    def _refuse_other_tokens(self, inputs: Mapping[str, Path]) -> None:
        from eval.adapter import load_tokenizer
        from eval.fidelity.measure import refuse_other_tokens

        if "reference_model" in inputs:
            ours, theirs = (load_tokenizer(inputs[name]) for name in ("model", "reference_model"))
            refuse_other_tokens(ours, theirs, model=self.model, reference=self.reference)


# Bounds on the fidelity of a served model: 16-bit engine and a server in, bounds on the divergence out.


@dataclass(frozen=True, kw_only=True)
class FidelityServed(_Reading):
    """Engine folder of the 16-bit model, tokenizer and texts in, `bounds.json` of a server that runs already out.

    Never cached, because the server may change. Its answers are kept beside the runs until the result is written, so
    that a stopped run resumes.

    Attributes:
        eval: where the server is, and how it is asked.
        answers: folder for answers of unfinished runs.
    """

    eval: EvalSettings
    answers: Path
    name = "bounds"
    version = "1"
    measures = True
    writes = "fidelity"

    def identity(self) -> dict[str, Any]:
        """Return what is read, with which arithmetic, the server, and the label, because it appears in the result."""
        server = {"url": self.eval.url, "served_model": self.eval.model}
        return {**self._read({"window", "top_logprobs"}), **server}

    def headline(self, facts: Mapping[str, Any]) -> str:
        """See `Stage`."""
        from eval.fidelity.fidelity_text import at_least

        return f"mean KL {at_least(facts['kl_mean_at_least'])}, top-1 {100 * facts['top1_agreement']:.2f} %"

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Ask the server about every window that it was not asked before, and read them with the engine."""
        from eval.fidelity.bounds import measure_served

        server = server_of(self.eval, self.identity(), self.answers / f"{self.model}-fidelity", progress)
        side = self._side(inputs["engine"], f"{self.model} in 16 bit")
        limits = side.session.limits
        longest = min(limits.max_input_len, limits.max_seq_len - 1)  # scoring over the API generates one more token
        texts = self._windows(inputs, longest)
        top, labels = self.fidelity.top_logprobs, {"model": self.model, "url": server.url, "served_model": server.model}
        result = measure_served(side, server, texts, top, progress, **labels)
        result.save(out_dir / result.FILE)
        server.answers.remove()
        return {name: getattr(result.overall, name) for name in ("kl_mean_at_least", "top1_agreement", "tokens")}
