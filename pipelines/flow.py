"""Which stages a target has, in the order they run, and what each of them reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.port import OnGpu
from pipelines.feature_settings import HEADS, MultimodalSettings
from pipelines.flavours import Flavour
from pipelines.machine import Machine, library_versions
from pipelines.memory_rules import cpu_predicted
from pipelines.settings import Settings
from pipelines.sources import BuiltEngine, Source
from pipelines.stages import Stage
from pipelines.stages.benchmark import Benchmark
from pipelines.stages.build import Build
from pipelines.stages.download import Download
from pipelines.stages.evaluate import Evaluate
from pipelines.stages.llm_api import ConfigureLlm
from pipelines.stages.quantize import Quantize
from pipelines.stages.repository import Repository
from pipelines.stages.script import build_vision, convert_heads
from pipelines.stages.sparsify import Sparsify
from triton_repo.spec import ImageSpec

if TYPE_CHECKING:
    from pipelines.compress.specs import Layout

Target = Literal["build", "evaluate", "repository", "serve", "benchmark", "all"]
EVALUATED: tuple[Target, ...] = ("evaluate", "all")
SERVED: tuple[Target, ...] = ("repository", "serve", "benchmark", "all")
STARTED: tuple[Target, ...] = ("serve", "benchmark", "all")
MEASURED: tuple[Target, ...] = ("benchmark", "all")
"""Targets with an accuracy, with a repository, with a running server, and with a measurement."""

ALONE = {
    "speculative_decoding_mode": None,
    "max_draft_len": 0,
    "lora_plugin": "disable",
    "lora_target_modules": None,
    "max_prompt_embedding_table_size": 0,
}
"""What a draft model is built without: it answers like any other engine."""

Inputs = dict[str, "str | Source"]
"""What a stage reads: the id of an earlier node, or something the user has."""


@dataclass(frozen=True, slots=True)
class Node:
    """One stage with its place in the flow."""

    id: str
    stage: Stage
    label: str
    inputs: Inputs


def is_elsewhere(settings: Settings, target: Target) -> bool:
    """Whether a server that runs elsewhere is measured, so that nothing is built."""
    return target == "benchmark" and settings.benchmark.url is not None


def farthest(settings: Settings) -> Target:
    """How far a configuration can go: the LLM API cannot be asked for the accuracy from here."""
    return "benchmark" if settings.engine.name == "tensorrt_llm_llmapi" else "all"


def nodes(
    settings: Settings,
    target: Target,
    flavour: Flavour,
    sources: Mapping[str, Source],
    shape: ModelShape | None,
    machine: Machine,
    built: BuiltEngine | None = None,
) -> list[Node]:
    """The stages of a target in the order they run.

    Args:
        settings: the configuration.
        target: how far to go.
        flavour: engine flavour that was chosen.
        sources: what the user has on disk: model, calibration, dataset, engine.
        shape: of the model, where known.
        machine: facts of this machine.
        built: facts of the engine among the sources.
    """
    flow = _Flow(settings, target, flavour, shape, machine, built, dict(sources))
    flow.downloads()
    if is_elsewhere(settings, target):
        flow.measure(settings)
        return flow.nodes
    baseline = settings.baseline()
    if target in EVALUATED and baseline.variant != settings.variant:
        flow.engine(baseline, "baseline.")
        flow.accuracy(baseline, "baseline.")
    flow.engine(settings, "")
    if target in EVALUATED:
        flow.accuracy(settings, "")
    if target == "build" or target in SERVED:
        flow.draft(settings)
        flow.vision(settings)
    if target in SERVED:
        flow.repository(settings)
    if target in MEASURED:
        flow.measure(settings)
    return flow.nodes


@dataclass
class _Flow:
    """Collects nodes; `given` is what a stage may read so far, by name."""

    settings: Settings
    target: Target
    flavour: Flavour
    shape: ModelShape | None
    machine: Machine
    built: BuiltEngine | None
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
        if self.flavour.name == "llmapi":
            self.llm_api(settings)
            return
        if settings.speculative.mode in HEADS and self.flavour.name == "tensorrt_llm":
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
        stage = Build(
            self.flavour.name, settings.build, self.flavour.build_libraries, self.flavour.packages, self._on_gpu()
        )
        self.add(prefix + "build", stage, label, {"checkpoint": "checkpoint"})
        self.given["engine"] = prefix + "build"

    def heads(self, settings: Settings, prefix: str) -> None:
        """Convert a model with its trained heads -> build."""
        label = f"{self.label(settings)}-{settings.speculative.mode}"
        scripts = settings.paths.trtllm_examples
        convert = convert_heads(settings.speculative, settings.build.tp_size, scripts)
        self.add(prefix + "convert", convert, label, {"model": "model", "heads": "heads"})
        self.given["converted"] = prefix + "convert"
        stage = Build(
            self.flavour.name, settings.build, self.flavour.build_libraries, self.flavour.packages, self._on_gpu()
        )
        self.add(prefix + "build", stage, label, {"converted": "converted"})
        self.given["engine"] = prefix + "build"

    def vision(self, settings: Settings) -> None:
        """The engine of the vision encoder, beside the language model's."""
        if settings.multimodal.model_type == "none" or self.flavour.name != "tensorrt_llm":
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
        if self.built is not None or self.flavour.name == "llmapi" or guess.mode != "draft_target":
            return
        assert guess.draft is not None  # the settings say so
        self._draft_checkpoint(settings, "tensorrt_llm")
        alone = settings.build.model_copy(update=ALONE)
        stage = Build(self.flavour.name, alone, self.flavour.build_libraries, self.flavour.packages, self._on_gpu())
        label = f"{guess.draft.label}-{guess.draft_qformat}"
        self.add("draft.build", stage, label, {"checkpoint": "draft_checkpoint"})
        self.given["draft_engine"] = "draft.build"

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

    def _on_gpu(self) -> OnGpu | None:
        """The GPU a TensorRT engine is for: this machine's, or where there is none the one asked about."""
        if self.flavour.name != "tensorrt_llm":
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

    def accuracy(self, settings: Settings, prefix: str) -> None:
        """Put the questions to the engine."""
        stage = Evaluate(
            self.flavour.name,
            settings.engine.openvino,
            settings.eval,
            settings.model.label,
            settings.variant,
            (*self.flavour.run_libraries, "lm-eval", "transformers", "tokenizers"),
            (*self.flavour.packages, "lm_eval", "transformers"),
        )
        inputs = {"engine": "engine", "model": "model", "dataset": "dataset"}
        self.add(prefix + "evaluate", stage, self.label(settings), inputs)

    def repository(self, settings: Settings) -> None:
        """Lay out the engine for tritonserver."""
        adapters = [name for name in self.given if name.startswith("lora.")]
        stage = Repository(
            self.flavour.name,
            settings.triton,
            settings.engine.openvino,
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
        """Put load on the server."""
        elsewhere = is_elsewhere(settings, self.target)
        libraries = ("tritonclient", *(() if elsewhere else self.flavour.run_libraries))
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
        """What the CPU engine should need at full load, for the result; empty where that is not modelled."""
        if elsewhere or self.built is not None or self.flavour.name != "openvino":
            return {}
        memory = cpu_predicted(settings, self.shape)
        return {"total": memory.total, **asdict(memory)} if memory else {}

    def _labels(self, settings: Settings, elsewhere: bool) -> dict[str, Any]:
        """Whose numbers these are. Of a server elsewhere nothing is known but what the user says."""
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
            "engine": self.flavour.name,
            "tp_size": tp_size,
            "world_size": tp_size * pp_size,
        }

    def _ranks(self, settings: Settings) -> tuple[int, int]:
        """(tp_size, pp_size) of the running engine; the ranks of a checkpoint become one process on the CPU."""
        if self.flavour.name == "openvino":
            return 1, 1
        if self.built is not None:
            return self.built.tp_size, self.built.pp_size
        return settings.build.tp_size, settings.build.pp_size


def _with_text(inputs: dict[str, str], calibrated: bool) -> dict[str, str]:
    return inputs | ({"calibration": "calibration"} if calibrated else {})


def _images(wanted: MultimodalSettings) -> ImageSpec | None:
    if wanted.model_type == "none":
        return None
    return ImageSpec(wanted.model_type, str(wanted.path), wanted.images_per_request)
