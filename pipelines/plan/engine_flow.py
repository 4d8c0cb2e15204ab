"""The stages from a model to its engine, for every kind of engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.port import OnGpu
from pipelines.engines.registry import EngineDescription
from pipelines.engines.tensorrt_llm.config import NOT_SPECULATING, BuildSettings
from pipelines.engines.tuning import Recommended, adjusted, advice, tuned
from pipelines.host.machine import Machine, torch_device
from pipelines.plan.memory_checks import gpu_predicted
from pipelines.plan.recovery_checks import training_processes
from pipelines.plan.targets import Target, asks
from pipelines.predict.performance.gpus import resolved
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings
from pipelines.stages import Stage
from pipelines.stages.build import Build
from pipelines.stages.download import Download
from pipelines.stages.llm_api import ConfigureLlm
from pipelines.stages.prune_model import PruneModel
from pipelines.stages.quantize import Quantize
from pipelines.stages.recover import Recover
from pipelines.stages.script import HEADS_DTYPE, build_vision, convert_heads
from pipelines.stages.sparsify import Sparsify
from pipelines.store.sources import BuiltEngine, InputSource

if TYPE_CHECKING:
    from pipelines.compress.specs import Layout

# Tune the engines of a plan, and say what is set without being asked for.


def tune(settings: Settings, engine: EngineDescription, shape: ModelShape | None, machine: Machine) -> Settings:
    """Return the settings with the advice for this engine on the GPU that is named or found."""
    return tuned(settings, engine, shape, resolved(settings.hardware, machine))


def tuning_notes(
    settings: Settings, engine: EngineDescription, shape: ModelShape | None, machine: Machine, *, baseline: bool
) -> tuple[str, ...]:
    """Return a line for each default that gives way to another setting, and for each setting that the tuning chooses.

    The latter also for the baseline, where that differs.

    Args:
        settings: the configuration.
        engine: the chosen engine.
        shape: of the model, where known.
        machine: facts of this machine.
        baseline: whether the 16-bit baseline is built as well.
    """
    changed = tuple(each.line for each in adjusted(settings, engine, shape))
    if not engine.recommends:
        return changed
    if settings.tuning.name == "plain":
        return (*changed, "tuning=plain: nothing is set for speed; tuning=recommended does")

    def advised(wanted: Settings, sizes: ModelShape | None) -> tuple[Recommended, ...]:
        return advice(wanted, engine, sizes, resolved(settings.hardware, machine))

    own = advised(settings, shape)
    lines = [f"tuning: {each.line}" for each in own]
    if baseline:
        base = advised(settings.baseline(), shape.unpruned if shape else None)
        lines += [f"tuning of the 16-bit baseline: {each.line}" for each in base if each not in own]
        lacks = [each.word for each in own if each not in base]
        lines += [f"tuning of the 16-bit baseline: without {', '.join(lacks)}"] if lacks else []
    return (*changed, *lines)


OF_ADAPTERS = ("lora_plugin", "lora_target_modules")
ALONE = {
    **NOT_SPECULATING,
    "max_prompt_embedding_table_size": 0,
    "weight_sparsity": False,
}
"""Build settings that a draft model is built without, because it answers like any other engine."""

Inputs = dict[str, "str | InputSource"]
"""Input of a stage: the id of an earlier node, or something the user has."""


@dataclass(frozen=True, slots=True)
class Node:
    """One stage and its place in the flow."""

    id: str
    stage: Stage
    label: str
    inputs: Inputs


@dataclass
class EngineFlow:
    """Collects nodes; `given` holds what a stage can read so far, by name."""

    settings: Settings
    target: Target
    chosen: EngineDescription
    shape: ModelShape | None
    machine: Machine
    built: BuiltEngine | None
    draft_shape: ModelShape | None
    given: Inputs
    nodes: list[Node] = field(default_factory=list)

    def add(self, name: str, stage: Stage, label: str, inputs: Mapping[str, str]) -> None:
        """Append a stage; `inputs` maps the stage's input names to names in `given`."""
        self.nodes.append(Node(name, stage, label, {key: self.given[source] for key, source in inputs.items()}))

    def downloads(self) -> None:
        """Add the downloads from the Hub, which all variants share."""
        model, questions = self.settings.model, self.settings.eval
        if "model" not in self.given:
            stage = Download(str(model.hub_id), model.revision or "main", "model", unpruned(self.shape))
            self.add("download", stage, model.label, {})
            self.given["model"] = "download"
        if asks(self.settings, self.target) and "dataset" not in self.given:
            revision = questions.revision or "main"
            stage = Download(str(questions.dataset), revision, "dataset", copy_setting="eval.dataset_path")
            self.add("download.eval", stage, questions.task, {})
            self.given["dataset"] = "download.eval"

    def tuned(self, settings: Settings, shape: ModelShape | None) -> Settings:
        """Return the settings of another engine of the flow, tuned for its own format and model."""
        return tune(settings, self.chosen, shape, self.machine)

    def variant(self, settings: Settings) -> str:
        """Return the label of the compression; an engine built elsewhere has its own."""
        return self.built.variant if self.built else settings.variant

    def label(self, settings: Settings) -> str:
        """Return the name of a variant's artifacts."""
        return f"{settings.model.label}-{self.variant(settings)}"

    def engine(self, settings: Settings, prefix: str) -> None:
        """Add the stages of its checkpoint and build for one variant; afterwards `given["engine"]` is its engine."""
        if self.built is not None:
            return
        if not self.chosen.writes_engine:
            self.llm_api(settings)
            return
        if settings.speculative.mode in HEADS and self.chosen.example_scripts:
            self.heads(settings, prefix)
            return
        self.checkpoint(settings, prefix)
        shape = self.shape if settings.prune.prunes else unpruned(self.shape)
        predicted = gpu_predicted(settings, shape) if self.chosen.memory_model == "rank" else {}
        stage = self._build(settings.build, shape, predicted)
        self.add(prefix + "build", stage, self.label(settings), {"checkpoint": "checkpoint"})
        self.given["engine"] = prefix + "build"

    def checkpoint(self, settings: Settings, prefix: str) -> None:
        """Add prune, sparsify, recover and quantize for one variant; its checkpoint is then `given["checkpoint"]`."""
        label, weights = self.label(settings), "model"
        quantize, sparsify = self._compression(settings)
        sparse = settings.sparsity.method != "none"
        if settings.prune.prunes:
            self._prune(settings, prefix)
            weights = "compressed"
        if quantize.calibrated or (sparse and sparsify.calibrated):
            self._calibration_text()
        if sparse:
            self.add(prefix + "sparsify", sparsify, label, _with_text({"model": weights}, sparsify.calibrated))
            weights = "compressed"
            self.given[weights] = prefix + "sparsify"
        if settings.recover.trains:
            self._recover(settings, prefix, weights)
            weights = "compressed"
        self.add(prefix + "quantize", quantize, label, _with_text({"model": weights}, quantize.calibrated))
        self.given["checkpoint"] = prefix + "quantize"

    def _prune(self, settings: Settings, prefix: str) -> None:
        """Add the pruning of the model; afterwards `given["pruned"]` and `given["compressed"]` are the smaller one."""
        self._calibration_text()
        stage = PruneModel(settings.prune, settings.calibration, torch_device(self.machine))
        self.add(prefix + "prune_model", stage, self.label(settings), _with_text({"model": "model"}, True))
        self.given["pruned"] = self.given["compressed"] = prefix + "prune_model"

    def _recover(self, settings: Settings, prefix: str, weights: str) -> None:
        """Add the training of what `given` has as `weights`; afterwards `given["compressed"]` is the trained model."""
        self._calibration_text()
        inputs = {"model": weights, "calibration": "calibration"}
        if settings.recover.method == "distill":
            inputs["teacher"] = "teacher" if "teacher" in self.given else "model"
        sparse = settings.sparsity.method != "none"
        device = torch_device(self.machine)
        processes = training_processes(settings, self.machine)
        stage = Recover(settings.recover, settings.calibration, sparse, settings.quant, device, processes)
        self.add(prefix + "recover", stage, self.label(settings), inputs)
        self.given["compressed"] = prefix + "recover"

    def heads(self, settings: Settings, prefix: str) -> None:
        """Add the conversion of a model with its trained heads, and its build."""
        label = f"{self.label(settings)}-{settings.speculative.mode}"
        scripts = settings.paths.trtllm_examples
        convert, model = convert_heads(settings.speculative, settings.build.tp_size, scripts), "model"
        if settings.speculative.mode == "redrafter":
            half = settings.quant.model_copy(update={"dtype": HEADS_DTYPE})
            quantize, _ = self._compression(settings.model_copy(update={"quant": half}))
            self.add(prefix + "quantize", quantize, self.label(settings), {"model": "model"})
            model = "checkpoint"
            self.given[model] = prefix + "quantize"
        self.add(prefix + "convert", convert, label, {"model": model, "heads": "heads"})
        self.given["converted"] = prefix + "convert"
        self.add(prefix + "build", self._build(settings.build, self.shape), label, {"converted": "converted"})
        self.given["engine"] = prefix + "build"

    def vision(self, settings: Settings) -> None:
        """Add the build of the vision encoder's engine."""
        if settings.multimodal.model_type == "none" or not self.chosen.example_scripts:
            return
        script = build_vision(settings.multimodal, settings.build.max_batch_size, settings.paths.trtllm_examples)
        self.add("vision", script, f"{settings.model.label}-{settings.multimodal.model_type}", {"vision": "vision"})
        self.given["vision_engine"] = "vision"

    def llm_api(self, settings: Settings) -> None:
        """Add the export to a Hugging Face checkpoint and the configuration of the LLM API; it fits all splits."""
        label, self.given["checkpoint"] = self.label(settings), self.given["model"]
        if settings.quant.qformat != QFormat.NONE:
            quantize, _ = self._compression(settings)
            quantize = replace(quantize, layout="hugging_face", tp_size=1, pp_size=1)
            self._calibration_text()
            self.add("quantize", quantize, label, _with_text({"model": "model"}, quantize.calibrated))
            self.given["checkpoint"] = "quantize"
        runtime, inputs = settings.runtime, {"checkpoint": "checkpoint", "model": "model"}
        self._draft_checkpoint(settings, "hugging_face")
        drafts = settings.speculative.num_draft_tokens if "draft_checkpoint" in self.given else None
        chunked, word = runtime.enable_chunked_context, settings.image.draft_word
        stage = ConfigureLlm(settings.build, settings.triton, settings.kv_cache, chunked, drafts, word)
        self.add("build", stage, label, inputs | ({} if drafts is None else {"draft": "draft_checkpoint"}))
        self.given["engine"] = "build"

    def draft(self, settings: Settings) -> None:
        """Add the build of the draft model's engine; afterwards it is `given["draft_engine"]`."""
        guess = settings.speculative
        if self.built is not None or not self.chosen.writes_engine or guess.mode != "draft_target":
            return
        assert guess.draft is not None  # checked by the settings
        self._draft_checkpoint(settings, "tensorrt_llm")
        label, build = f"{guess.draft.label}-{guess.draft_qformat}", self._draft_settings(settings).build
        self.add("draft.build", self._build(build, self.draft_shape), label, {"checkpoint": "draft_checkpoint"})
        self.given["draft_engine"] = "draft.build"

    def _draft_settings(self, settings: Settings) -> Settings:
        """Return the settings of the draft model's engine, tuned for its own format."""
        qformat = settings.speculative.draft_qformat
        build = settings.build if qformat == settings.quant.qformat else settings.build.in_16_bit()
        alone = build.without(OF_ADAPTERS).model_copy(
            update={**ALONE, "max_seq_len": self._draft_longest(settings.build)}
        )
        quant = settings.quant.model_copy(update={"qformat": qformat})
        return self.tuned(settings.model_copy(update={"quant": quant, "build": alone}), self.draft_shape)

    def _draft_longest(self, build: BuildSettings) -> int | None:
        """Return the draft's max_seq_len, no longer than its target's; None means its own longest sequence."""
        longest, target, draft = build.max_seq_len, self.shape, self.draft_shape
        if longest is None and target and draft and draft.max_position_embeddings > target.max_position_embeddings:
            return target.max_position_embeddings
        return longest

    def _draft_checkpoint(self, settings: Settings, layout: Layout) -> None:
        """Add the quantization of the draft model; afterwards it is `given["draft_checkpoint"]`, if there is one."""
        guess = settings.speculative
        if guess.mode != "draft_target" or guess.draft is None or guess.draft_qformat is None:
            return
        if "draft" not in self.given:
            stage = Download(str(guess.draft.hub_id), guess.draft.revision or "main", "model")
            self.add("download.draft", stage, "draft", {})
            self.given["draft"] = "download.draft"
        self.given["draft_checkpoint"] = self.given["draft"]
        if layout == "hugging_face" and guess.draft_qformat == QFormat.NONE:
            return
        quantize, _ = self._compression(self._draft_settings(settings))
        if layout == "hugging_face":
            quantize = replace(quantize, layout=layout, tp_size=1, pp_size=1)
        if quantize.calibrated:
            self._calibration_text()
        label = f"{guess.draft.label}-{guess.draft_qformat}"
        self.add("draft.quantize", quantize, label, _with_text({"model": "draft"}, quantize.calibrated))
        self.given["draft_checkpoint"] = "draft.quantize"

    def _build(
        self, build: BuildSettings, shape: ModelShape | None, predicted: Mapping[str, float] | None = None
    ) -> Build:
        """Make the stage that builds the chosen engine for a model of this shape."""
        engine, longest = self.chosen, shape.max_position_embeddings if shape else None
        libraries, packages = engine.build_libraries, engine.packages
        return Build(engine.name, build, libraries, packages, self._on_gpu(), longest, predicted or {})

    def _on_gpu(self) -> OnGpu | None:
        """Return the GPU an engine is built for: this machine's, or without one the GPU named by the settings."""
        if not self.chosen.needs_gpu:
            return None
        gpus, hardware, paths = self.machine.gpus, self.settings.hardware, self.settings.paths
        name, sm = (gpus[0].name, gpus[0].sm) if gpus else (hardware.gpu or "", hardware.sm)
        return OnGpu(name, sm, paths.store.absolute() / ".timing_caches", paths.runs.absolute())

    def _compression(self, settings: Settings) -> tuple[Quantize, Sparsify]:
        device, text, build = torch_device(self.machine), settings.calibration, settings.build
        quantize = Quantize(settings.quant, settings.kv_cache, text, build.tp_size, build.pp_size, device)
        return quantize, Sparsify(settings.sparsity, text, device)

    def _calibration_text(self) -> None:
        if "calibration" in self.given:
            return
        text = self.settings.calibration
        self.add("download.calibration", Download(str(text.dataset), text.revision or "main", "dataset"), "text", {})
        self.given["calibration"] = "download.calibration"


def unpruned(shape: ModelShape | None) -> ModelShape | None:
    """Return the shape of the model before pruning, where known."""
    return None if shape is None else shape.unpruned


def _with_text(inputs: dict[str, str], calibrated: bool) -> dict[str, str]:
    return inputs | ({"calibration": "calibration"} if calibrated else {})
