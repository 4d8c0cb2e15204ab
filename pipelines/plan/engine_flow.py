"""From a model to its engine: the stages of each way, as nodes of the flow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.description import EngineDescription
from pipelines.engines.port import OnGpu
from pipelines.host.machine import Machine, library_versions
from pipelines.plan.memory_checks import gpu_predicted
from pipelines.plan.targets import EVALUATED, Target
from pipelines.settings.build import NOT_SPECULATING, BuildSettings
from pipelines.settings.features import HEADS
from pipelines.settings.root import Settings
from pipelines.stages import Stage
from pipelines.stages.build import Build
from pipelines.stages.download import Download
from pipelines.stages.llm_api import ConfigureLlm
from pipelines.stages.quantize import Quantize
from pipelines.stages.script import build_vision, convert_heads
from pipelines.stages.sparsify import Sparsify
from pipelines.store.sources import BuiltEngine, InputSource

if TYPE_CHECKING:
    from pipelines.compress.specs import Layout

ALONE = {
    **NOT_SPECULATING,
    "lora_plugin": "disable",
    "lora_target_modules": None,
    "max_prompt_embedding_table_size": 0,
}
"""What a draft model is built without: it answers like any other engine."""

Inputs = dict[str, "str | InputSource"]
"""What a stage reads: the id of an earlier node, or something the user has."""


@dataclass(frozen=True, slots=True)
class Node:
    """One stage with its place in the flow."""

    id: str
    stage: Stage
    label: str
    inputs: Inputs


@dataclass
class EngineFlow:
    """Collects nodes; `given` is what a stage may read so far, by name."""

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
        """Append a stage; `inputs` maps the stage's words to names in `given`."""
        self.nodes.append(Node(name, stage, label, {key: self.given[source] for key, source in inputs.items()}))

    def downloads(self) -> None:
        """What comes from the Hub and is shared by every variant."""
        model, questions = self.settings.model, self.settings.eval
        if "model" not in self.given:
            stage = Download(str(model.hub_id), model.revision or "main", "model", self.shape)
            self.add("download", stage, model.label, {})
            self.given["model"] = "download"
        if self.target in EVALUATED and "dataset" not in self.given:
            stage = Download(str(questions.dataset), questions.revision or "main", "dataset")
            self.add("download.eval", stage, questions.task, {})
            self.given["dataset"] = "download.eval"

    def variant(self, settings: Settings) -> str:
        """Label of the compression; an engine that was built elsewhere knows its own."""
        return self.built.variant if self.built else settings.variant

    def label(self, settings: Settings) -> str:
        """Name of a variant's artifacts."""
        return f"{settings.model.label}-{self.variant(settings)}"

    def engine(self, settings: Settings, prefix: str) -> None:
        """Sparsify -> quantize -> build for one variant; afterwards `given["engine"]` is its engine."""
        if self.built is not None:
            return
        if not self.chosen.writes_engine:
            self.llm_api(settings)
            return
        if settings.speculative.mode in HEADS and self.chosen.example_scripts:
            self.heads(settings, prefix)
            return
        label, weights = self.label(settings), "model"
        quantize, sparsify = self._compression(settings)
        sparse = settings.sparsity.method != "none"
        if quantize.calibrated or (sparse and sparsify.calibrated):
            self._calibration_text()
        if sparse:
            self.add(prefix + "sparsify", sparsify, label, _with_text({"model": "model"}, sparsify.calibrated))
            weights = "sparse"
            self.given[weights] = prefix + "sparsify"
        self.add(prefix + "quantize", quantize, label, _with_text({"model": weights}, quantize.calibrated))
        self.given["checkpoint"] = prefix + "quantize"
        predicted = gpu_predicted(settings, self.shape) if self.chosen.memory_model == "rank" else {}
        stage = self._build(settings.build, self.shape, predicted)
        self.add(prefix + "build", stage, label, {"checkpoint": "checkpoint"})
        self.given["engine"] = prefix + "build"

    def heads(self, settings: Settings, prefix: str) -> None:
        """Convert a model with its trained heads -> build."""
        label = f"{self.label(settings)}-{settings.speculative.mode}"
        scripts = settings.paths.trtllm_examples
        convert = convert_heads(settings.speculative, settings.build.tp_size, scripts)
        self.add(prefix + "convert", convert, label, {"model": "model", "heads": "heads"})
        self.given["converted"] = prefix + "convert"
        self.add(prefix + "build", self._build(settings.build, self.shape), label, {"converted": "converted"})
        self.given["engine"] = prefix + "build"

    def vision(self, settings: Settings) -> None:
        """The engine of the vision encoder, beside the language model's."""
        if settings.multimodal.model_type == "none" or not self.chosen.example_scripts:
            return
        script = build_vision(settings.multimodal, settings.build.max_batch_size, settings.paths.trtllm_examples)
        self.add("vision", script, f"{settings.model.label}-{settings.multimodal.model_type}", {"vision": "vision"})
        self.given["vision_engine"] = "vision"

    def llm_api(self, settings: Settings) -> None:
        """Quantize to a Hugging Face checkpoint -> configure the LLM API; one checkpoint serves every split."""
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
        stage = ConfigureLlm(settings.build, settings.triton, settings.kv_cache, runtime.enable_chunked_context, drafts)
        self.add("build", stage, label, inputs | ({} if drafts is None else {"draft": "draft_checkpoint"}))
        self.given["engine"] = "build"

    def draft(self, settings: Settings) -> None:
        """Build the engine of the smaller model that guesses; afterwards `given["draft_engine"]` is it."""
        guess = settings.speculative
        if self.built is not None or not self.chosen.writes_engine or guess.mode != "draft_target":
            return
        assert guess.draft is not None  # the settings say so
        self._draft_checkpoint(settings, "tensorrt_llm")
        alone = settings.build.model_copy(update={**ALONE, "max_seq_len": self._draft_longest(settings.build)})
        label = f"{guess.draft.label}-{guess.draft_qformat}"
        self.add("draft.build", self._build(alone, self.draft_shape), label, {"checkpoint": "draft_checkpoint"})
        self.given["draft_engine"] = "draft.build"

    def _draft_longest(self, build: BuildSettings) -> int | None:
        """A draft's max_seq_len: no sequence of it outgrows its target's; None is its own longest."""
        longest, target, draft = build.max_seq_len, self.shape, self.draft_shape
        if longest is None and target and draft and draft.max_position_embeddings > target.max_position_embeddings:
            return target.max_position_embeddings
        return longest

    def _draft_checkpoint(self, settings: Settings, layout: Layout) -> None:
        """Quantize the smaller model; afterwards `given["draft_checkpoint"]` is it, where there is one."""
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
        quant = settings.quant.model_copy(update={"qformat": guess.draft_qformat})
        quantize, _ = self._compression(settings.model_copy(update={"quant": quant}))
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
        """The stage that makes the chosen engine of a model of that shape."""
        engine, longest = self.chosen, shape.max_position_embeddings if shape else None
        libraries, packages = engine.build_libraries, engine.packages
        return Build(engine.name, build, libraries, packages, self._on_gpu(), longest, predicted or {})

    def _on_gpu(self) -> OnGpu | None:
        """The GPU an engine is built for: this machine's, or where there is none the one asked about."""
        if not self.chosen.needs_gpu:
            return None
        gpus, hardware, paths = self.machine.gpus, self.settings.hardware, self.settings.paths
        name, sm = (gpus[0].name, gpus[0].sm) if gpus else (hardware.gpu or "", hardware.sm)
        return OnGpu(name, sm, paths.store.absolute() / ".timing_caches", paths.runs.absolute())

    def _compression(self, settings: Settings) -> tuple[Quantize, Sparsify]:
        without_cuda = library_versions(("torch",))["torch"].endswith("+cpu")
        device = "cuda" if self.machine.gpus and not without_cuda else "cpu"
        text, build = settings.calibration, settings.build
        quantize = Quantize(settings.quant, settings.kv_cache, text, build.tp_size, build.pp_size, device)
        return quantize, Sparsify(settings.sparsity, text, device)

    def _calibration_text(self) -> None:
        if "calibration" in self.given:
            return
        text = self.settings.calibration
        self.add("download.calibration", Download(str(text.dataset), text.revision or "main", "dataset"), "text", {})
        self.given["calibration"] = "download.calibration"


def _with_text(inputs: dict[str, str], calibrated: bool) -> dict[str, str]:
    return inputs | ({"calibration": "calibration"} if calibrated else {})
