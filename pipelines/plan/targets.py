"""Targets: how far a command goes, and what each target includes."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

from eval.spec import LARGE, known_questions
from pipelines.engines.registry import with_setting
from pipelines.settings.base import Group
from pipelines.settings.root import Settings

Target = Literal["build", "evaluate", "repository", "serve", "benchmark", "fidelity", "diagnose", "all"]
EVALUATED: tuple[Target, ...] = ("evaluate", "all")
SERVED: tuple[Target, ...] = ("repository", "serve", "benchmark", "all")
STARTED: tuple[Target, ...] = ("serve", "benchmark", "all")
MEASURED: tuple[Target, ...] = ("benchmark", "all")
COMPARED: tuple[Target, ...] = ("fidelity", "all")
"""Targets that evaluate, write a repository, run a server, measure, and compare predictions with the 16-bit model's."""


@dataclass(frozen=True)
class Goal:
    """A configuration and its target."""

    settings: Settings
    target: Target

    def with_groups(self, **groups: Group) -> Self:
        """Return the same with other groups of settings."""
        return replace(self, settings=self.settings.model_copy(update=groups))

    @property
    def is_elsewhere(self) -> bool:
        """Whether a server running elsewhere is measured or asked, so that nothing is built."""
        urls = {"benchmark": self.settings.benchmark.url, "evaluate": self.settings.eval.url}
        return urls.get(self.target) is not None

    @property
    def compares_server(self) -> bool:
        """Whether predictions of a server running elsewhere are compared; only the 16-bit model is built then."""
        return self.target == "fidelity" and self.settings.eval.url is not None

    @property
    def asks_trtllm_serve(self) -> bool:
        """Whether the questions are put to a trtllm-serve that is started for each model, one after the other."""
        return self.target == "evaluate" and self.settings.serving.server == "trtllm_serve" and not self.is_elsewhere

    @property
    def asks(self) -> bool:
        """Whether questions are asked; a model that is not bundled may have none."""
        return self.target in EVALUATED and not self.settings.eval.is_auto

    @property
    def is_unasked(self) -> bool:
        """Whether a loss was to be judged, and there are no questions."""
        return self.target in EVALUATED and self.settings.eval.is_auto and self.has_baseline

    @cached_property
    def has_baseline(self) -> bool:
        """Whether the 16-bit model is built beside the compressed one, and evaluated where the target evaluates."""
        if self.is_elsewhere or self.target not in (*EVALUATED, *COMPARED):
            return False
        fidelity, baseline = self.settings.fidelity, self.settings.eval.baseline
        is_needed = fidelity.reference_path is None if self.target == "fidelity" else baseline == "build"
        return is_needed and self.settings.is_compressed

    @property
    def has_reference(self) -> bool:
        """Whether the model is also evaluated in Transformers, to compare the engine with it."""
        return self.asks and self.settings.eval.baseline == "hugging_face"

    @property
    def has_verdict(self) -> bool:
        """Whether there is something that an evaluation is judged by."""
        return self.has_baseline or self.has_reference

    @property
    def is_sequential(self) -> bool:
        """Whether both models are asked in turns, and asking stops as soon as the verdict is known."""
        questions = self.settings.eval
        if not self.asks or not self.has_baseline or self.asks_trtllm_serve:
            return False
        large = (known_questions(questions.task, questions.limit) or 0) >= LARGE or questions.max_questions is not None
        return large if questions.sequential is None else questions.sequential

    @property
    def compares(self) -> bool:
        """Whether the target compares predictions, if the engine can and the 16-bit model is built."""
        return self.target in COMPARED or (self.target == "evaluate" and self.settings.eval.fidelity)


def farthest(settings: Settings) -> Target:
    """Return how far a configuration can go: not every engine can be served or evaluated here."""
    engine = with_setting(settings.engine.name)
    if engine is None or (engine.evaluates and engine.server):
        return "all"
    if engine.server:
        return "benchmark"
    return "evaluate" if engine.evaluates else "build"
