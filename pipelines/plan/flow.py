"""The stages of a target in the order they run, and what each of them reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from eval.fidelity.config import ALONE, AMONG_OTHERS
from eval.spec import PASSKEY
from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import EngineDescription, ServerBackend
from pipelines.host.machine import Machine, torch_device
from pipelines.plan.accuracy_checks import asked_questions
from pipelines.plan.engine_flow import EngineFlow, Node, unpruned
from pipelines.plan.memory_checks import cpu_reached, two_models
from pipelines.plan.targets import (
    MEASURED,
    SERVED,
    Target,
    asks,
    compares_server,
    has_baseline,
    has_fidelity,
    has_reference,
    is_elsewhere,
    is_sequential,
)
from pipelines.settings.features import MultimodalSettings
from pipelines.settings.model import ModelSettings
from pipelines.settings.root import Settings
from pipelines.stages.benchmark import Benchmark
from pipelines.stages.diagnose import Diagnose
from pipelines.stages.evaluate import (
    REFERENCE,
    SERVED_ELSEWHERE,
    Evaluate,
    EvaluateReference,
    EvaluateSequentially,
    EvaluateServed,
    longest_scored,
)
from pipelines.stages.fidelity import TEXTS as FIDELITY_TEXTS
from pipelines.stages.fidelity import Fidelity, FidelityServed
from pipelines.stages.repository import WriteRepository
from pipelines.store.sources import BuiltEngine, InputSource
from pipelines.store.space import ANSWERS
from triton_repo.parameters import ImageSpec


def nodes(
    settings: Settings,
    target: Target,
    engine: EngineDescription,
    sources: Mapping[str, InputSource],
    shape: ModelShape | None,
    machine: Machine,
    built: BuiltEngine | None = None,
    draft_shape: ModelShape | None = None,
    reference_shape: ModelShape | None = None,
) -> list[Node]:
    """List the stages of a target in the order they run.

    Args:
        settings: the configuration.
        target: how far to go.
        engine: the chosen engine.
        sources: what the user has on disk: model, calibration, dataset, engine.
        shape: of the model, where known.
        machine: facts of this machine.
        built: facts of the engine among the sources.
        draft_shape: of the draft model, where known.
        reference_shape: of another model to compare predictions with.
    """
    flow = _Flow(settings, target, engine, shape, machine, built, draft_shape, dict(sources))
    flow.downloads()
    if is_elsewhere(settings, target):
        (flow.ask_server if target == "evaluate" else flow.measure)(settings)
        return flow.nodes
    if target == "diagnose":
        flow.diagnose(settings)
        return flow.nodes
    if has_baseline(settings, target):
        flow.baseline(settings)
    if has_reference(settings, target):
        flow.reference(settings)
    flow.reference_engine(settings, reference_shape)
    flow.engine(settings, "")
    if asks(settings, target):
        flow.accuracy(settings)
    flow.fidelity(settings)
    if target == "build" or target in SERVED:
        flow.draft(settings)
        flow.vision(settings)
    if target in SERVED:
        flow.repository(settings)
    if target in MEASURED:
        flow.measure(settings)
    return flow.nodes


def needed_for(made: list[Node], name: str) -> list[Node]:
    """Return the stage called `name` and the stages it needs, in the order they run.

    Raises:
        UserError: there is no such stage.
    """
    by_name = {node.id: node for node in made}
    if name not in by_name:
        raise UserError(
            f"stage.name='{name}' is not a stage of this plan.",
            allowed=f"Choose one of {', '.join(by_name)}.",
            todo=did_you_mean(name, by_name),
        )
    needed = {name}
    for node in reversed(made):  # inputs are made before
        if node.id in needed:
            needed |= {given for given in node.inputs.values() if isinstance(given, str)}
    return [node for node in made if node.id in needed]


class _Flow(EngineFlow):
    """The flow from the engine on: evaluation, repository, benchmark."""

    def baseline(self, settings: Settings) -> None:
        """Add the 16-bit engine, and its evaluation unless it is asked in turns with the other."""
        alone = self.tuned(settings.baseline(), unpruned(self.shape))
        self.engine(alone, "baseline.")
        self.given |= {"baseline": self.given["engine"], "reference": self.given["engine"]}
        if asks(settings, self.target) and not is_sequential(settings, self.target):
            self._accuracy_alone(alone, "baseline.")

    def accuracy(self, settings: Settings) -> None:
        """Add the evaluation of the engine, alone or in turns with the 16-bit one."""
        if is_sequential(settings, self.target):
            self._accuracy_in_turns(settings)
        else:
            self._accuracy_alone(settings, "")

    def _accuracy_alone(self, settings: Settings, prefix: str) -> None:
        stage = Evaluate(
            self.chosen.name,
            self.chosen.options_of(settings.engine),
            settings.eval,
            settings.model.label,
            settings.variant,
            *self._harness(),
            warns=self._warns(),
        )
        inputs = {"engine": "engine", "model": "model", "dataset": "dataset"}
        self.add(prefix + "evaluate", stage, self.label(settings), inputs)

    def _accuracy_in_turns(self, settings: Settings) -> None:
        stage = EvaluateSequentially(
            self.chosen.name,
            self.chosen.options_of(settings.engine),
            settings.eval,
            settings.model.label,
            settings.variant,
            *self._harness(),
            warns=self._warns(),
            answers=settings.paths.store.absolute() / ANSWERS,
        )
        inputs = {name: name for name in ("engine", "baseline", "model", "dataset")}
        self.add("evaluate", stage, self.label(settings), inputs)

    def _warns(self) -> bool:
        """Return whether a verdict follows, and only the evaluation learns whether the questions are too few for it."""
        judged = has_baseline(self.settings, self.target) or has_reference(self.settings, self.target)
        return judged and asked_questions(self.settings) is None

    def _harness(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the libraries and the packages of an evaluation."""
        libraries = (*self.chosen.run_libraries, "lm-eval", "transformers", "tokenizers")
        return libraries, (*self.chosen.packages, "lm_eval", "transformers")

    def reference(self, settings: Settings) -> None:
        """Add the evaluation of the model itself, in Transformers."""
        build = settings.build
        positions = self.shape.max_position_embeddings if self.shape else None
        longest = build.max_seq_len or positions
        limit = None if longest is None else longest_scored(self.chosen.name, longest, build.max_num_tokens)
        stage = EvaluateReference(settings.eval, settings.model.label, limit, torch_device(self.machine), self._warns())
        self.add("reference", stage, f"{settings.model.label}-{REFERENCE}", {"model": "model", "dataset": "dataset"})

    def reference_engine(self, settings: Settings, shape: ModelShape | None) -> None:
        """Add the 16-bit engine of another model to compare with; afterwards it is `given["reference"]`."""
        if settings.fidelity.reference_path is None or not self._compares(settings):
            return
        model, chosen = self.given["model"], _reference_model(settings)
        self.given["model"] = self.given["reference_model"]
        baseline = settings.baseline().model_copy(update={"model": chosen})
        self.engine(self.tuned(baseline, shape), "reference.")
        self.given |= {"model": model, "reference": self.given["engine"]}

    def fidelity(self, settings: Settings) -> None:
        """Add the comparison of predictions with those of the reference, if the target has one."""
        if compares_server(settings, self.target):
            self._fidelity_of_server(settings)
            return
        if not self._compares(settings):
            return
        wanted = settings.fidelity
        stage = Fidelity(
            self.chosen.name,
            self.chosen.options_of(settings.engine),
            wanted,
            wanted.tokens or (ALONE if self.target == "fidelity" else AMONG_OTHERS),
            settings.calibration,
            settings.quant,
            settings.model.label,
            settings.variant,
            _reference_model(settings).label,
            (*self.chosen.run_libraries, "numpy", "transformers", "tokenizers"),
            (*self.chosen.packages, "transformers"),
        )
        beside = [name for name in ("reference_model",) if name in self.given]
        inputs = {name: name for name in ("engine", "reference", "model", *beside, *self._texts(settings))}
        self.add("fidelity", stage, self.label(settings), inputs)

    def _fidelity_of_server(self, settings: Settings) -> None:
        stage = FidelityServed(
            self.chosen.name,
            self.chosen.options_of(settings.engine),
            settings.eval,
            settings.fidelity,
            settings.fidelity.tokens or ALONE,
            settings.calibration,
            settings.model.label,
            settings.paths.runs.absolute() / ".answers",
            (*self.chosen.run_libraries, "numpy", "transformers", "tokenizers"),
            (*self.chosen.packages, "transformers"),
        )
        inputs = {name: name for name in ("engine", "model", *self._texts(settings))}
        self.add("fidelity", stage, f"{settings.model.label}-{SERVED_ELSEWHERE}", inputs)

    def _texts(self, settings: Settings) -> list[str]:
        """Return the names of the texts that predictions are compared on."""
        texts, calibration = settings.fidelity.texts, settings.calibration
        names: list[str] = [name for name in FIDELITY_TEXTS.values() if name in self.given and name != "calibration"]
        if "calibration" in (texts or ()) and not (calibration.shipped and settings.fidelity.shipped):
            self._calibration_text()
            names.append("calibration")
        return names

    def _compares(self, settings: Settings) -> bool:
        """Return whether the target has a fidelity, and this machine the memory for it."""
        fits = not two_models(settings, self.shape, self.machine.memory_bytes)
        return has_fidelity(settings, self.target, self.chosen) and fits

    def diagnose(self, settings: Settings) -> None:
        """Add the diagnosis of what is given, or of what this configuration makes as far as it runs here."""
        # activations that the engine rounds by itself would look like a fault of it
        settings = settings.model_copy(update={"engine": settings.engine.with_checkpoints_arithmetic()})
        asked, elsewhere = settings.diagnose, settings.eval.url is not None
        quantize, _ = self._compression(settings)
        if not asked.given:
            self._made_here(settings, serve=asked.serve and not elsewhere)
        names = ["compressed", "checkpoint", "engine", "repository"]
        if not asked.given and asked.simulate and quantize.calibrated:
            names.append("calibration")
        stage = Diagnose(
            asked,
            None if asked.given else quantize,
            settings.eval.url,
            settings.eval.model,
            settings.serving,
            self.chosen.name,
            self.chosen.options_of(settings.engine),
            settings.model.label,
            "given" if asked.given else self.variant(settings),
            settings.paths.runs.absolute(),
            self.chosen.gives_logits,
            (*self.chosen.run_libraries, "numpy", "torch", "transformers", "tokenizers"),
            ("torch", "transformers", *(self.chosen.packages if self.chosen.gives_logits else ())),
        )
        inputs = {name: name for name in ("model", "text.bundled", *names) if name in self.given}
        if "pruned" in self.given:  # a diagnosis compares layer by layer, so with a model of the same sizes
            inputs["model"] = "pruned"
        self.add("diagnose", stage, self.label(settings), inputs)

    def _made_here(self, settings: Settings, *, serve: bool) -> None:
        if not self.chosen.gives_logits:  # its engine is built and run on a GPU machine
            self.checkpoint(settings, "")
            return
        self.engine(settings, "")
        if serve:
            self.draft(settings)
            self.repository(settings)

    def ask_server(self, settings: Settings) -> None:
        """Add the evaluation of a model on a server that runs already."""
        positions = self.shape.max_position_embeddings if self.shape else None
        stage = EvaluateServed(
            settings.eval,
            settings.model.label,
            settings.build.max_seq_len or positions,
            settings.paths.runs.absolute() / ".answers",
            settings.build.max_input_len if settings.eval.task == PASSKEY else None,
        )
        label = f"{settings.model.label}-{SERVED_ELSEWHERE}"
        self.add("evaluate", stage, label, {"model": "model", "dataset": "dataset"})

    def repository(self, settings: Settings) -> None:
        """Add the Triton repository of the engine."""
        adapters = [name for name in self.given if name.startswith("lora.")]
        stage = WriteRepository(
            self.chosen.name,
            settings.triton,
            self.chosen.options_of(settings.engine),
            settings.kv_cache.enable_block_reuse,
            settings.runtime.enable_chunked_context,
            settings.model.label,
            self.variant(settings),
            *self._ranks(settings),
            num_draft_tokens=settings.speculative.num_draft_tokens if "draft_engine" in self.given else None,
            images=_images(settings.multimodal) if "vision_engine" in self.given else None,
            lora_tasks=tuple(sorted(int(name.removeprefix("lora.")) for name in adapters)),
        )
        beside = [*(name for name in ("draft_engine", "vision_engine") if name in self.given), *adapters]
        inputs = {"engine": "engine", "model": "model", **{name: name for name in beside}}
        self.add("repository", stage, self.label(settings), inputs)
        self.given["repository"] = "repository"

    def measure(self, settings: Settings) -> None:
        """Add the benchmark of the server."""
        elsewhere = is_elsewhere(settings, self.target)
        libraries = ("tritonclient", *(() if elsewhere else self.chosen.run_libraries))
        stage = Benchmark(
            settings.workload,
            settings.benchmark,
            settings.serving,
            self._labels(settings, elsewhere),
            self.machine.to_json(),
            settings.paths.runs.absolute(),
            libraries,
            self._predicted(settings, elsewhere),
        )
        label = f"{settings.model.label}-elsewhere" if elsewhere else self.label(settings)
        inputs = {"model": "model"} if elsewhere else {"repository": "repository", "model": "model"}
        self.add("benchmark", stage, label, inputs)

    def _predicted(self, settings: Settings, elsewhere: bool) -> dict[str, float]:
        """Return the modelled memory of the engine's process under this load; empty where there is no model."""
        if elsewhere or self.built is not None or self.chosen.memory_model != "process":
            return {}
        memory = cpu_reached(settings, self.shape)
        return {"total": memory.total, **asdict(memory)} if memory else {}

    def _labels(self, settings: Settings, elsewhere: bool) -> dict[str, Any]:
        """Return the labels of the result; of a server elsewhere, only what the user states is known."""
        if elsewhere:
            said = settings.benchmark
            return {
                "model": settings.model.label,
                "precision": said.precision or "unknown",
                "engine": "unknown",
                "tp_size": said.tp_size or 1,
                "world_size": said.tp_size or 1,
            }
        tp_size, pp_size = self._ranks(settings)
        return {
            "model": settings.model.label,
            "precision": self.variant(settings),
            "engine": self.chosen.name,
            "tp_size": tp_size,
            "world_size": tp_size * pp_size,
            "gpu_count": self._gpu_count(settings, tp_size * pp_size),
        }

    def _gpu_count(self, settings: Settings, world_size: int) -> int:
        """Return the GPUs of all instances together, and of a draft model that has its own."""
        triton = settings.triton
        if self.chosen.server is not ServerBackend.TENSORRTLLM:
            return world_size
        groups = list(triton.gpu_device_ids or (range(world_size),))
        if "draft_engine" in self.given:
            groups += triton.draft_gpu_device_ids or ()
        return len({gpu for group in groups for gpu in group})

    def _ranks(self, settings: Settings) -> tuple[int, int]:
        """Return (tp_size, pp_size) of the running engine."""
        if not self.chosen.keeps_ranks:
            return 1, 1
        if self.built is not None:
            return self.built.tp_size, self.built.pp_size
        return settings.build.tp_size, settings.build.pp_size


def _reference_model(settings: Settings) -> ModelSettings:
    """Return the model that is compared with in 16 bit."""
    path = settings.fidelity.reference_path
    return settings.model if path is None else settings.model.model_copy(update={"path": path})


def _images(wanted: MultimodalSettings) -> ImageSpec | None:
    if wanted.model_type == "none":
        return None
    return ImageSpec(wanted.model_type, str(wanted.path), wanted.images_per_request)
