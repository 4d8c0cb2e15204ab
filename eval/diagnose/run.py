"""Put the same items through every stage of a deployment, and stop at the first that differs beyond the noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eval.adapter import load_tokenizer
from eval.diagnose.checkpoint import compare_scales, examine, examine_simulation
from eval.diagnose.engine import AGAIN, EXACT, ROUNDED, Retraced, Step
from eval.diagnose.result import AGAIN as EXPORT_AGAIN
from eval.diagnose.result import Finding, Place, StageDiagnosis, StageResult, StageVerdict
from eval.diagnose.served import examine_openai, examine_triton
from eval.diagnose.servers import WORDS, Item, LastStage, RightAnswers, Servers, make_items, whole_logits
from eval.fidelity.divergence import compare_logits
from pipelines.checkpoint.read import Checkpoint
from pipelines.checkpoint.tokenizer import opened
from pipelines.compress.traced import TracedModel, trace_checkpoint, trace_model
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.formats import FORMATS
from pipelines.domain.progress import Progress
from pipelines.engines.port import LogitsSession
from pipelines.engines.registry import open_engine
from pipelines.host.files import parse_json

if TYPE_CHECKING:
    from pipelines.compress.simulating import SimulatedModel
    from pipelines.compress.specs import QuantSpec

Array = np.ndarray[Any, Any]

STEP_TOKENS = 48
"""Tokens of the text for which every step is computed again; they are given the last positions that the engine has."""
STEP_BYTES = 512 * 2**20
"""Memory for the results of steps; as many layers are read at a time as fit."""
STEPS_OF_A_LAYER = 24
LIKE_NOISE, LEAST_KL, LEAST_KL_FP4 = 20.0, 0.03, 0.5
"""KL of an engine from its decoded checkpoint that flipped codes explain: in units of the noise, and in nats. An FP4
code is a step of up to a third of its value; 0.05 was measured."""
WITHOUT_AN_ENGINE = 1024
"""Tokens of the long prompt where no engine says what it takes."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """How ModelOpt's simulation of a checkpoint is made again."""

    spec: QuantSpec
    make: Callable[[], SimulatedModel]


@dataclass(frozen=True, slots=True)
class DiagnosedFolders:
    """Folders of the stages; None for a stage that does not exist or cannot run here.

    Attributes:
        model: Hugging Face folder, with its tokenizer.
        source: what was quantized: the model, or its sparse form.
        texts: JSON lines that prompts are taken from.
        simulation: of the format that the checkpoint was calibrated in; None without.
        rounded: whether weights are rounded to the nearest code, which a checkpoint of `int4_rtn` does not say.
        serve: starts the servers, and returns where they are; None without.
        not_run: why a stage is not run, by stage.
        template: chat template that the server is given instead of the model's own.
    """

    model: Path
    source: Path
    texts: Path
    simulation: Simulation | None = None
    rounded: bool = False
    checkpoint: Path | None = None
    engine: Path | None = None
    engine_name: str = "openvino"
    options: Mapping[str, Any] = field(default_factory=dict)
    serve: Callable[[ExitStack], Servers] | None = None
    not_run: Mapping[str, str] = field(default_factory=dict)
    template: Path | None = None


def diagnose(
    folders: DiagnosedFolders, *, model: str, variant: str, seed: int, new_tokens: int, progress: Progress
) -> StageDiagnosis:
    """Compare each stage with the one before it, until one is accused.

    Raises:
        UserError: a stage cannot be read at all.
    """
    work = _Work(folders, seed, new_tokens, progress)
    results: dict[str, StageResult] = {}
    accused = False
    for stage in work.stages():
        results[stage.stage] = stage
        if accused := stage.verdict == StageVerdict.ACCUSED:
            break
    for place in Place:
        why = folders.not_run.get(place, "")
        verdict = StageVerdict.AFTER if accused and not why else StageVerdict.NOT_RUN
        results.setdefault(place, StageResult(place, "", "", "", verdict, why))
    lengths = sorted(len(item.ids) for item in work.items)
    items = f"{count(len(lengths), 'item')} of {lengths[0]} to {lengths[-1]} tokens"
    return StageDiagnosis(model, variant, items, tuple(results[place] for place in Place))


@dataclass
class _Work:
    folders: DiagnosedFolders
    seed: int
    new_tokens: int
    progress: Progress

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own."""
        return load_tokenizer(self.folders.model)

    @cached_property
    def session(self) -> LogitsSession | None:
        """The engine, which loads nothing before it is used."""
        if self.folders.engine is None:
            return None
        session = open_engine(self.folders.engine_name, **self.folders.options).open(self.folders.engine)
        assert isinstance(session, LogitsSession), "the plan gives no other engines"
        return session

    @cached_property
    def items(self) -> list[Item]:
        """Inputs of the stages."""
        longest = WITHOUT_AN_ENGINE
        if self.session is not None:
            limits = self.session.limits
            longest = min(limits.max_input_len, limits.max_seq_len - self.new_tokens)
        return make_items(
            self.tokenizer, self.folders.texts, self.seed, longest, self.folders.model, self.folders.template
        )

    @property
    def read(self) -> list[tuple[int, ...]]:
        """Token ids whose logits are compared: all but the long prompt."""
        return [item.ids for item in self.items if item.name != "long prompt"]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return opened(self.folders.model).end_ids

    def stages(self) -> Iterator[StageResult]:
        """Yield the results of the stages that are there, in order."""
        folders, model = self.folders, trace_model(self.folders.model)
        with self.progress.task("reading with Transformers", None):
            noise = _kl(model.logits(self.read), trace_model(folders.model, "bfloat16").logits(self.read))
        note = "the model in float32; its distance from itself in bfloat16 is the noise of 16-bit arithmetic"
        yield StageResult(Place.ORIGINAL, "", f"KL {noise:.2g}", "", StageVerdict.REFERENCE, note)
        if folders.checkpoint is None:
            yield from self._served(model, Place.ORIGINAL)
            return
        if folders.source != folders.model:
            model = trace_model(folders.source)
        inputs = model.largest_inputs([item.ids for item in self.items])
        simulated = None if folders.simulation is None else folders.simulation.make()
        if simulated is not None and folders.simulation is not None:
            yield examine_simulation(simulated, model, folders.simulation.spec, inputs, self.progress)
        checkpoint = Checkpoint(folders.checkpoint)
        result = examine(checkpoint, model, inputs, self.progress, rounded=folders.rounded)
        model = trace_checkpoint(folders.model, checkpoint)
        yield result if simulated is None else self._exported(result, checkpoint, simulated, model, noise)
        if self.session is not None:
            yield self._engine(self.session, checkpoint, model, noise)
        yield from self._served(model, Place.CHECKPOINT)

    def _exported(
        self, result: StageResult, checkpoint: Checkpoint, simulated: SimulatedModel, decoded: TracedModel, noise: float
    ) -> StageResult:
        """Compare a checkpoint with the simulation that it was exported from as well: its scales and its answers."""
        if result.verdict == StageVerdict.ACCUSED:
            return result
        findings, note = compare_scales(checkpoint, simulated), result.note
        # weights that the build quantizes are floats in the simulation, which therefore answers otherwise
        if not findings and not FORMATS[checkpoint.config.qformat].weights.at_build:
            away = _kl(simulated.logits(self.read), decoded.logits(self.read))
            note = f"{note}; answers KL {away:.2g} from ModelOpt's simulation"
            if away > max(LIKE_NOISE * noise, LEAST_KL):
                cause = "its tensors are within their limits, but its answers are not those of ModelOpt's simulation"
                findings = [Finding(None, "checkpoint", f"KL {away:.2g}", cause, EXPORT_AGAIN)]
        if not findings:
            return replace(result, note=note)
        return replace(
            result, verdict=StageVerdict.ACCUSED, worst=findings[0].figure, noise="", note="", findings=tuple(findings)
        )

    def _engine(
        self, session: LogitsSession, checkpoint: Checkpoint, decoded: TracedModel, noise: float
    ) -> StageResult:
        """Compare the engine with its checkpoint: its description, each step, and its answers."""
        findings, note = list(self._description(checkpoint)), ""
        errors: list[tuple[float, float, str]] = []
        for step in self._steps(session, checkpoint) if not findings else ():
            errors.append((step.error / step.allowed, step.error, step.name))
            if step.error > step.allowed:
                findings.append(step.finding())
                break
        _, error, name = max(errors, key=lambda each: each[0], default=(0.0, 0.0, ""))
        if not findings:
            forcing = session.teacher_forcing()
            away = _kl(decoded.logits(self.read), [whole_logits(forcing, ids) for ids in self.read])
            note = f"{len(errors)} steps, worst {name}; answers KL {away:.2g} from the decoded checkpoint"
            fp4 = any(FORMATS[qformat].activation == "fp4" for qformat in checkpoint.config.qformats)
            if away > max(LIKE_NOISE * noise, LEAST_KL_FP4 if fp4 else LEAST_KL):
                cause = "its steps are right, but its answers are not those of the decoded checkpoint"
                findings.append(Finding(None, "graph", f"KL {away:.2g}", cause, AGAIN))
        against = f"{Place.CHECKPOINT}: every step, computed again"
        worst, allowed = f"{100 * error:.1g} %", f"{100 * EXACT:g} %, codes {100 * ROUNDED:g} %"
        return StageResult.judged(Place.CPU_ENGINE, against, findings, worst, allowed, note)

    def _description(self, checkpoint: Checkpoint) -> Iterator[Finding]:
        assert self.folders.engine is not None
        ours = checkpoint.config.raw
        theirs = parse_json((self.folders.engine / "config.json").read_text(encoding="utf-8"))["pretrained_config"]
        for name in sorted(set(theirs) | set(ours)):
            if theirs.get(name) != ours.get(name):
                values = f"it is {theirs.get(name)}, the checkpoint has {ours.get(name)}"
                cause = f"{values}: the engine was built from another checkpoint, or edited"
                yield Finding(None, f"config.json {name}", str(theirs.get(name)), cause, AGAIN)

    def _steps(self, session: LogitsSession, checkpoint: Checkpoint) -> Iterator[Step]:
        config = checkpoint.config
        tokens = list(self.items[len(WORDS)].ids[:STEP_TOKENS])
        first = max(0, session.limits.max_seq_len - len(tokens))
        size = STEPS_OF_A_LAYER * len(tokens) * max(config.intermediate_size, config.hidden_size) * 4
        layers, at_once = config.num_hidden_layers, max(1, STEP_BYTES // size)
        retraced = Retraced(checkpoint, cache(lambda name: dict(session.linear_weights()).get(name)))
        with self.progress.task("computing steps again", layers, "layers") as advance:
            for start in range(0, layers, at_once):
                chosen = range(start, min(start + at_once, layers))
                steps = session.step_results(tokens, first, chosen)
                if start == 0:
                    yield from retraced.outside(steps, tokens, first)
                for layer in chosen:
                    yield from retraced.layer(steps, layer)
                    advance(1)
        yield from retraced.head(steps)

    def _served(self, last: TracedModel, place: Place) -> Iterator[StageResult]:
        """Compare what is served with the last stage before it that runs here."""
        if self.folders.serve is None:
            return
        source = LastStage(self.session, last, self.new_tokens, frozenset(self.ends), self.progress)
        before = place if self.session is None else Place.CPU_ENGINE
        expected = RightAnswers(self.items, source, self.new_tokens, self.tokenizer, self.ends, before)
        with ExitStack() as stack:
            served = self.folders.serve(stack)
            for there, examined in ((served.triton, examine_triton), (served.openai, examine_openai)):
                if there is None:
                    continue
                result = examined(served, expected, self.progress)
                yield result
                if result.verdict == StageVerdict.ACCUSED:
                    return


def _kl(right: Sequence[Array], actual: Sequence[Array]) -> float:
    """Return the mean KL divergence over all positions, nats."""
    if not all(np.isfinite(each).all() for each in (*right, *actual)):
        raise UserError("A stage gives logits that are NaN or infinite.", todo="Check the checkpoint: make verify")
    kls = [compare_logits(a, b, np.zeros(len(a), dtype=np.int64)).kl for a, b in zip(right, actual, strict=True)]
    return float(np.concatenate(kls).mean())
