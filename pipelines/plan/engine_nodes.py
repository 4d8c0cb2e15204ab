"""The nodes of the flow from a model to its engine, for every kind of engine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipelines.domain.formats import QFormat
from pipelines.engines.config import OpenVinoSettings, options_of_build
from pipelines.engines.openvino.memory import groups_experts
from pipelines.engines.port import OnGpu
from pipelines.engines.registry import ServerBackend
from pipelines.engines.tensorrt_llm.llm_api import merged, sampling_option
from pipelines.plan.deployment import Deployment
from pipelines.plan.memory_checks import gpu_predicted
from pipelines.plan.weights_checks import training_processes
from pipelines.settings.features import HEADS
from pipelines.stages import Stage
from pipelines.stages.build import Build
from pipelines.stages.compress import PruneModel, Recover, Sparsify
from pipelines.stages.download import Download
from pipelines.stages.llava import BuildVision, TakeLanguageModel
from pipelines.stages.quantize import Quantize
from pipelines.stages.script import HEADS_DTYPE, build_vision, convert_heads
from pipelines.stages.unified import ConfigureLlm, ExportEdge
from pipelines.store.sources import InputSource

Input = str | InputSource
"""The id of the node that makes it, or something the user has."""


@dataclass(frozen=True, slots=True)
class Node:
    """One stage and its place in the flow."""

    id: str
    stage: Stage
    label: str
    inputs: dict[str, Input]


LANGUAGE_MODEL = "language_model"
"""Id of the node that takes it out of a model with more parts."""


def takes_language_model(d: Deployment) -> bool:
    """Return whether the language model is one part of the model; beside a built engine, only its tokenizer is read."""
    return d.inputs.whole is not None and d.on_model


def model(d: Deployment) -> Input:
    """Return where a deployment's model comes from."""
    if d.prefix == "draft.":
        return d.sources.get("draft", "download.draft")
    if takes_language_model(d) and d.prefix != "reference.":
        return LANGUAGE_MODEL
    return d.sources["reference_model"] if d.prefix == "reference." else d.sources.get("model", "download")


def model_download(d: Deployment) -> list[Node]:
    """Return the steps all variants share: the download of the model and the extraction of its language model."""
    source, made = d.settings.model, []
    if "model" not in d.sources:
        stage = Download(str(source.hub_id), source.revision or "main", "model", d.unpruned)
        made = [Node("download", stage, source.label, {})]
    if takes_language_model(d):
        whole = d.sources.get("model", "download")
        made.append(Node(LANGUAGE_MODEL, TakeLanguageModel(), source.label, {"model": whole}))
    return made


def calibration_text(d: Deployment) -> tuple[list[Node], dict[str, Input]]:
    """Return the download of the text, unless the user has it, and the text as an input."""
    if "calibration" in d.sources:
        return [], {"calibration": d.sources["calibration"]}
    text = d.settings.calibration
    stage = Download(str(text.dataset), text.revision or "main", "dataset")
    return [Node("download.calibration", stage, "text", {})], {"calibration": "download.calibration"}


def _with_text(d: Deployment, node: Node, *, calibrated: bool = True) -> list[Node]:
    """Return a node after the text that it reads, if it reads one."""
    if not calibrated:
        return [node]
    before, text = calibration_text(d)
    return [*before, replace(node, inputs=node.inputs | text)]


def engine(d: Deployment) -> Input:
    """Return where the engine of a deployment comes from."""
    return d.sources["engine"] if d.built is not None else f"{d.prefix}build"


def engine_nodes(d: Deployment) -> list[Node]:
    """Return the nodes of a deployment's checkpoint and build; none for an engine that is already built."""
    if d.built is not None:
        return []
    if not d.engine.writes_engine:
        return _unified(d)
    if d.settings.speculative.mode in HEADS and d.engine.example_scripts:
        return _with_heads(d)
    shape = d.shape if d.settings.prune.prunes else d.unpruned
    predicted = gpu_predicted(d.settings, shape) if d.engine.memory_model == "rank" else {}
    built = build(replace(d, shape=shape), predicted)
    return [*checkpoint_nodes(d), Node(f"{d.prefix}build", built, d.label, {"checkpoint": f"{d.prefix}quantize"})]


def checkpoint_nodes(d: Deployment) -> list[Node]:
    """Return the nodes that prune, sparsify, recover and quantize; the last writes the checkpoint."""
    made: list[Node] = []
    settings, weights = d.settings, model(d)
    if settings.prune.prunes:
        pruned = PruneModel(settings.prune, settings.calibration, d.device)
        made += _with_text(d, Node(f"{d.prefix}prune_model", pruned, d.label, {"model": weights}))
        weights = made[-1].id
    quantized = quantize(d)
    if settings.sparsity.method != "none":
        if quantized.reads_texts:
            made += calibration_text(d)[0]
        sparse = Sparsify(settings.sparsity, settings.calibration, d.device)
        node = Node(f"{d.prefix}sparsify", sparse, d.label, {"model": weights})
        made += _with_text(d, node, calibrated=sparse.calibrated)
        weights = made[-1].id
    if settings.recover.trains:
        made += _recover(d, weights)
        weights = made[-1].id
    node = Node(f"{d.prefix}quantize", quantized, d.label, {"model": weights})
    return made + _with_text(d, node, calibrated=quantized.reads_texts)


def quantize(d: Deployment) -> Quantize:
    """Return the stage that quantizes the model of a deployment."""
    settings = d.settings
    ranks = settings.build.tp_size, settings.build.pp_size
    window = d.shape.sliding_window if d.shape and d.shape.family.states_window_late else 0
    return Quantize(
        settings.quant,
        settings.kv_cache,
        settings.calibration,
        *ranks,
        d.device,
        moe_ep_size=settings.build.moe_ep_size,
        late_window=window,
        imported=d.imports,
        experts=d.shape is not None and d.shape.family.experts is not None,
    )


def _recover(d: Deployment, weights: Input) -> list[Node]:
    """Return the training of the weights, after its text."""
    settings = d.settings
    before, text = calibration_text(d)
    teacher = {"teacher": d.sources.get("teacher", model(d))} if settings.recover.method == "distill" else {}
    processes, sparse = training_processes(settings.recover, d.machine), settings.sparsity.method != "none"
    stage = Recover(settings.recover, settings.calibration, sparse, settings.quant, d.device, processes)
    return [*before, Node(f"{d.prefix}recover", stage, d.label, {"model": weights} | text | teacher)]


def build(d: Deployment, predicted: Mapping[str, float] | None = None) -> Build:
    """Return the stage that builds the engine of a deployment: for this machine's GPU, or without one that named."""
    settings = d.settings
    gpus, hardware, paths = d.machine.gpus, settings.hardware, settings.paths
    options = d.engine.options_of(settings.engine)
    if isinstance(options, OpenVinoSettings):
        grouped = groups_experts(options, d.shape, settings.quant.qformat)
        options = options.model_copy(update={"experts": "grouped" if grouped else "auto"})
    name, sm = (gpus[0].name, gpus[0].sm) if gpus else (hardware.gpu or "", hardware.sm)
    on_gpu = OnGpu(name, sm, paths.store.absolute() / ".timing_caches", paths.runs.absolute())
    return Build(
        d.engine.name,
        settings.build,
        d.engine.build_libraries,
        d.engine.packages,
        on_gpu if d.engine.needs_gpu else None,
        d.positions,
        predicted or {},
        options_of_build(options),
    )


def _with_heads(d: Deployment) -> list[Node]:
    """Return the conversion of a model with its trained heads, and its build."""
    settings, prefix = d.settings, d.prefix
    label, weights, made = f"{d.label}-{settings.speculative.mode}", model(d), list[Node]()
    if settings.speculative.mode == "redrafter":
        half = replace(quantize(d), quant=settings.quant.model_copy(update={"dtype": HEADS_DTYPE}))
        made.append(Node(f"{prefix}quantize", half, d.label, {"model": weights}))
        weights = f"{prefix}quantize"
    converted = convert_heads(settings.speculative, settings.build.tp_size, settings.paths.trtllm_examples)
    made.append(Node(f"{prefix}convert", converted, label, {"model": weights, "heads": d.sources["heads"]}))
    return [*made, Node(f"{prefix}build", build(d), label, {"converted": f"{prefix}convert"})]


def vision_nodes(d: Deployment) -> list[Node]:
    """Return the build of the vision encoder's engine; no node without one."""
    images, settings = d.settings.multimodal, d.settings
    if images.model_type == "none" or not (d.engine.example_scripts or d.engine.server is ServerBackend.PYTHON):
        return []
    label, source = f"{settings.model.label}-{images.model_type}", dict[str, Input](vision=d.sources["vision"])
    if d.engine.server is ServerBackend.PYTHON:
        return [Node("vision", BuildVision(), label, source)]
    script = build_vision(images, settings.build.max_batch_size, settings.paths.trtllm_examples)
    return [Node("vision", script, label, source)]


def _unified(d: Deployment) -> list[Node]:
    """Return the export to a Hugging Face checkpoint, which fits all splits, and what makes files for its reader."""
    settings, made, inputs = d.settings, list[Node](), {"checkpoint": model(d), "model": model(d)}
    if settings.quant.qformat != QFormat.NONE:
        exported = replace(quantize(d), layout="hugging_face", tp_size=1, pp_size=1, moe_ep_size=1, late_window=0)
        node = Node("quantize", exported, d.label, {"model": model(d)})
        made += _with_text(d, node, calibrated=exported.reads_texts)
        inputs["checkpoint"] = "quantize"
    if d.engine.on_device:
        return [*made, Node("build", ExportEdge(settings.paths.edge.absolute()), d.label, inputs)]
    drafts, others = None, d.llm_api.others
    if (draft := d.draft) is not None:
        made += draft_checkpoint_nodes(draft)
        inputs["draft"] = model(draft) if _reads_draft(draft) else "draft.quantize"
        drafts = settings.speculative.num_draft_tokens
        others = merged({"speculative_config": sampling_option(d.llm_api.version)}, others)
    chunked, word = settings.runtime.enable_chunked_context, settings.image.draft_word
    stage = ConfigureLlm(settings.build, settings.triton, settings.kv_cache, chunked, drafts, word, others)
    return [*made, Node(f"{d.prefix}build", stage, d.label, inputs)]


def draft_nodes(d: Deployment) -> list[Node]:
    """Return the build of the draft model's engine; none without one."""
    draft = d.draft
    if draft is None or d.built is not None or not d.engine.writes_engine:
        return []
    node = Node("draft.build", build(draft), _draft_label(draft), {"checkpoint": "draft.quantize"})
    return [*draft_checkpoint_nodes(draft), node]


def _draft_label(draft: Deployment) -> str:
    guess = draft.settings.speculative
    assert guess.draft is not None  # there is no such deployment without one
    return f"{guess.draft.label}-{guess.draft_qformat}"


def _reads_draft(draft: Deployment) -> bool:
    """Return whether the engine reads the draft model as it is: the LLM API does, in 16 bit."""
    return not draft.engine.writes_engine and draft.settings.quant.qformat == QFormat.NONE


def draft_checkpoint_nodes(draft: Deployment) -> list[Node]:
    """Return the download and the quantization of the draft model, as far as there are any."""
    made, source = list[Node](), draft.settings.speculative.draft
    if source is not None and "draft" not in draft.sources:
        made.append(
            Node("download.draft", Download(str(source.hub_id), source.revision or "main", "model"), "draft", {})
        )
    if _reads_draft(draft):
        return made
    stage = replace(quantize(draft), moe_ep_size=1)
    if not draft.engine.writes_engine:
        stage = replace(stage, layout="hugging_face", tp_size=1, pp_size=1, late_window=0)
    node = Node("draft.quantize", stage, _draft_label(draft), {"model": model(draft)})
    return made + _with_text(draft, node, calibrated=stage.reads_texts)
