"""Evaluate a compressed engine and its 16-bit baseline in turns, until the verdict on the loss is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.config import EvalSettings
from eval.results import BASELINE
from pipelines.domain.formats import QFormat
from pipelines.domain.progress import Progress
from pipelines.engines.config import EngineOptions, all_options, options_of_scores
from pipelines.engines.registry import open_engine
from pipelines.host.machine import library_versions
from pipelines.stages.evaluate import asked, engine_spec, kept
from pipelines.store.manifest import read_manifest
from pipelines.store.store import fingerprint

if TYPE_CHECKING:
    from eval.sequential import AskedEngine


@dataclass(frozen=True)
class EvaluateSequentially:
    """Two engine folders, their tokenizer and questions in, `evaluation.json` and `baseline.json` out.

    What an engine answered is kept in the store by its content, so that a run that was stopped goes on where it was,
    and the 16-bit engine is asked a question once for all formats.

    Attributes:
        engine: by name, see `pipelines.engines.registry`.
        options: the engine's own settings; None where it has none.
        eval: task, shots, and the criteria that decide when to stop.
        model: label for the results.
        variant: compression label for the result.
        answers: folder for the answers of all engines.
        libraries: of the engine and of the harness.
        needs: packages.
        warns: see `Evaluate`.
    """

    engine: str
    options: EngineOptions | None
    eval: EvalSettings
    model: str
    variant: str
    answers: Path
    libraries: tuple[str, ...]
    needs: tuple[str, ...]
    warns: bool = False
    name = "evaluate"
    version = "sequential 4"
    measures = False

    def identity(self) -> dict[str, Any]:
        """Return task, arithmetic, labels, and what decides when to stop; with what power to go on does not."""
        stop = self.eval.model_dump(include={"max_questions", "margin_points", "false_go", "judged_together"})
        return {
            "engine": self.engine,
            **options_of_scores(self.options),
            **asked(self.eval),
            "model": self.model,
            "variant": self.variant,
            "sequential": stop,
        }

    def run(self, inputs: Mapping[str, Path], out_dir: Path, progress: Progress) -> dict[str, Any]:
        """Ask both engines in turns."""
        from eval.harness import load_questions, write_lm_eval
        from eval.sequential import ask_in_turns
        from eval.verdict import Criteria, too_few

        folders = inputs["engine"], inputs["baseline"]
        questions = load_questions(engine_spec(self.eval, inputs["dataset"], self.engine, *folders), inputs["model"])
        criteria = Criteria.of(self.eval)
        most = min(questions.count, self.eval.max_questions or questions.count)
        if self.warns and (few := too_few(most, criteria, stops=True)):
            progress.note(f"warning: {few}")
        found = ask_in_turns(
            self._side(QFormat.NONE, inputs["baseline"]),
            self._side(self.variant, inputs["engine"]),
            inputs["model"],
            questions,
            criteria,
            progress,
            model=self.model,
            engine=self.engine,
            most=most,
            together=self.eval.judged_together,
        )
        found.baseline.save(out_dir / BASELINE)
        write_lm_eval(found.raw, found.result, out_dir)
        return {**kept(found.result, self.eval, out_dir), "of": questions.count}

    def _side(self, variant: str, folder: Path) -> AskedEngine:
        from eval.sequential import AskedEngine

        engine = open_engine(self.engine, **all_options(self.options))
        return AskedEngine(variant, lambda: engine.open(folder), self._log(folder))

    def _log(self, folder: Path) -> Path:
        """Return the file with the answers of an engine: token ids in, scores or token ids out."""
        engine = fingerprint(
            {
                "engine": self.engine,
                **options_of_scores(self.options),
                "libraries": library_versions(self.libraries),
                "content": read_manifest(folder)["digest"],
            }
        )
        return self.answers / engine[:KEY] / "answers.jsonl"


KEY = 16
"""Hex digits of an engine's content and arithmetic in the name of the folder with its answers."""
