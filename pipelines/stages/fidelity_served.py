"""Bounds on the fidelity of a served model: 16-bit engine and a server in, bounds on the divergence out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.config import EvalSettings
from eval.fidelity.config import FidelitySettings
from pipelines.compress.config import CalibrationSettings
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options, options_of_scores
from pipelines.engines.registry import open_engine
from pipelines.stages.fidelity import windows_of
from pipelines.stages.quantize import calibration_identity


@dataclass(frozen=True)
class FidelityServed:
    """Engine folder of the 16-bit model, tokenizer and texts in, `bounds.json` of a server that runs already out.

    Being a measurement of something that may change, it is never cached. What the server answered is kept beside the
    runs until the result is written, so that a run that was stopped goes on where it was.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        eval: where the server is, and how it is asked.
        fidelity: windows, and how many log probabilities are asked for.
        tokens: predicted tokens of all texts together.
        calibration: where the calibration text is, and how much of it is left out if the rest is enough.
        model: label of the 16-bit model.
        answers: folder for answers of unfinished runs.
        libraries: of the engine.
        needs: packages.
    """

    engine: str
    options: EngineOptions | None
    eval: EvalSettings
    fidelity: FidelitySettings
    tokens: int
    calibration: CalibrationSettings
    model: str
    answers: Path
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    name = "bounds"
    version = "1"
    measures = True

    def identity(self) -> dict[str, Any]:
        """Return what is read, with which arithmetic, the server, and the label, because it appears in the result."""
        mine = self.fidelity.path
        return {
            "engine": self.engine,
            **options_of_scores(self.options),
            **self.fidelity.model_dump(include={"window", "top_logprobs"}),
            "tokens": self.tokens,
            "calibration": calibration_identity(self.calibration),
            "url": self.eval.url,
            "served_model": self.eval.model,
            "model": self.model,
            **({"file_type": mine.suffix, "column": self.fidelity.column} if mine else {}),
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Ask the server about every window that it was not asked before, and read them with the engine."""
        from eval.adapter import load_tokenizer
        from eval.fidelity.bounds import RESULT, ROUNDING, BoundsResult, measure_served
        from eval.fidelity.measure import Side
        from eval.kept import AnswerLog
        from eval.server import OpenAiServer
        from pipelines.engines.port import LogitsSession

        identity = hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()[:16]
        answers = AnswerLog(self.answers / f"{self.model}-fidelity-{identity}.jsonl")
        if len(answers):
            progress.note(f"{len(answers):,} answers of a run that was stopped are taken from {answers.path}")
        asked = self.eval
        server = OpenAiServer(
            str(asked.url), asked.model or "", answers, asked.concurrency, asked.attempts, asked.timeout_s
        )
        server.choose_model()
        session = open_engine(self.engine, **all_options(self.options)).open(inputs["engine"])
        assert isinstance(session, LogitsSession), "the plan has this stage only for engines that give logits"
        limits = session.limits
        longest = min(limits.max_input_len, limits.max_seq_len - 1)  # a server adds a token to what it scores
        tokenizer, wanted = load_tokenizer(inputs["model"]), self.fidelity
        texts = windows_of(inputs, wanted, self.tokens, self.calibration, tokenizer, longest)
        side = Side(f"{self.model} in 16 bit", session)
        measured = measure_served(side, server, texts, wanted.top_logprobs, progress)
        result = BoundsResult(
            model=self.model,
            url=server.url,
            served_model=server.model,
            arithmetic=measured.arithmetic,
            window=len(texts[0].rows[0]),
            vocabulary=session.vocabulary,
            top_logprobs=wanted.top_logprobs,
            rounding=ROUNDING,
            overall=measured.overall,
            texts=measured.texts,
        )
        result.save(out_dir / RESULT)
        answers.remove()
        return {name: getattr(result.overall, name) for name in ("kl_mean_at_least", "top1_agreement", "tokens")}
