"""The stages of a target in the order they run, and what each of them reads."""

from collections.abc import Iterable
from dataclasses import asdict
from graphlib import TopologicalSorter
from typing import Any

from eval.config import TOKENS_ALONE, TOKENS_AMONG_OTHERS
from eval.spec import PASSKEY, PICTURES
from pipelines.domain.errors import UserError, did_you_mean
from pipelines.domain.formats import rounding_is_known
from pipelines.engines.config import all_options
from pipelines.engines.registry import ServerBackend
from pipelines.plan.accuracy_checks import asked_questions
from pipelines.plan.deployment import Deployment
from pipelines.plan.engine_nodes import (
    Input,
    Node,
    calibration_text,
    checkpoint_nodes,
    draft_nodes,
    engine,
    engine_nodes,
    model,
    model_download,
    quantize,
    vision_nodes,
)
from pipelines.plan.memory_checks import cpu_reached, two_models
from pipelines.plan.targets import MEASURED, SERVED
from pipelines.stages.benchmark import Benchmark
from pipelines.stages.diagnose import Diagnose
from pipelines.stages.download import Download
from pipelines.stages.evaluate import (
    REFERENCE,
    SERVED_ELSEWHERE,
    Evaluate,
    EvaluateByTrtllmServe,
    EvaluateReference,
    EvaluateSequentially,
    EvaluateServed,
    longest_scored,
)
from pipelines.stages.fidelity import TEXTS as FIDELITY_TEXTS
from pipelines.stages.fidelity import Fidelity, FidelityServed
from pipelines.stages.repository import WriteRepository
from pipelines.store.space import ANSWERS
from triton_repo.parameters import ImageSpec, RepositorySpec


def nodes(d: Deployment) -> list[Node]:
    """List the stages of a deployment's target in the order they run."""
    made, questions = model_download(d), d.settings.eval
    if d.asks and "dataset" not in d.sources:  # all variants share them
        source = str(questions.dataset), questions.revision or "main"
        stage = Download(*source, "dataset", copy_setting="eval.dataset_path")
        made.append(Node("download.eval", stage, questions.task, {}))
    return in_order([*made, *_nodes(d)])


def _nodes(d: Deployment) -> list[Node]:
    """List the stages after the downloads; what several of them read may be listed more than once."""
    if d.is_elsewhere:
        return [_ask_server(d) if d.target == "evaluate" else _benchmark(d)]
    if d.target == "diagnose":
        return _diagnose(d)
    compares = d.has_fidelity and not two_models(d)
    made = engine_nodes(d.baseline) if d.has_baseline else []
    if d.has_baseline and d.asks and not d.is_sequential:
        made += _evaluate(d.baseline)
    if d.has_reference:
        made.append(_evaluate_reference(d))
    if compares and d.settings.fidelity.reference_path is not None:
        made += engine_nodes(d.reference)
    made += engine_nodes(d)
    if d.asks:
        made += vision_nodes(d) if d.settings.eval.task == PICTURES else []
        made += _evaluate(d)
    if d.compares_server:
        made += _fidelity_of_server(d)
    elif compares:
        made += _fidelity(d)
    return made + _served(d)


def _served(d: Deployment) -> list[Node]:
    """Return the engines besides the model's own, the repository and the benchmark, as far as the target goes."""
    made = [*draft_nodes(d), *vision_nodes(d)] if d.target == "build" or d.target in SERVED else []
    if d.target in SERVED:
        made.append(_repository(d))
    if d.target in MEASURED:
        made.append(_benchmark(d))
    return made


def in_order(made: Iterable[Node]) -> list[Node]:
    """Return each node once, after what it reads, and otherwise in the order given."""
    by_id: dict[str, Node] = {}
    for node in made:
        by_id.setdefault(node.id, node)
    place = {name: number for number, name in enumerate(by_id)}
    sorter = TopologicalSorter({name: _before(node) for name, node in by_id.items()})
    sorter.prepare()
    ordered: list[Node] = []
    ready: list[str] = []
    while sorter.is_active():
        ready = sorted((*ready, *sorter.get_ready()), key=place.__getitem__)
        sorter.done(first := ready.pop(0))
        ordered.append(by_id[first])
    return ordered


def _before(node: Node) -> list[str]:
    return [source for source in node.inputs.values() if isinstance(source, str)]


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
            needed.update(_before(node))
    return [node for node in made if node.id in needed]


def _asked(d: Deployment) -> dict[str, Input]:
    seen: dict[str, Input] = {"vision_engine": "vision"} if d.settings.eval.task == PICTURES and vision_nodes(d) else {}
    return {"model": model(d), "dataset": d.sources.get("dataset", "download.eval"), **seen}


def _evaluate(d: Deployment) -> list[Node]:
    """Return the evaluation of an engine: in turns with the 16-bit one, by itself, or behind its own server."""
    if d.asks_trtllm_serve:
        return _ask_trtllm_serve(d)
    settings, chosen = d.settings, d.engine
    labels = settings.model.label, settings.variant.label
    libraries = (*chosen.run_libraries, "lm-eval", "transformers", "tokenizers")
    packages = (*chosen.packages, "lm_eval", "transformers")
    needed = chosen.name, chosen.options_of(settings.engine), settings.eval, *labels, libraries, packages
    if not d.is_sequential:
        stage = Evaluate(*needed, warns=_warns(d))
        return [Node(f"{d.prefix}evaluate", stage, d.label, {"engine": engine(d), **_asked(d)})]
    answers = settings.paths.store.absolute() / ANSWERS
    in_turns = EvaluateSequentially(*needed, warns=_warns(d), answers=answers)
    return [Node("evaluate", in_turns, d.label, {"engine": engine(d), "baseline": engine(d.baseline), **_asked(d)})]


def _warns(d: Deployment) -> bool:
    """Return whether a verdict follows, and only the evaluation learns whether the questions are too few for it."""
    return (d.has_verdict or bool(d.prefix)) and asked_questions(d.settings.eval) is None


def _evaluate_reference(d: Deployment) -> Node:
    """Return the evaluation of the model itself, in Transformers."""
    build, name = d.settings.build, d.settings.model.label
    longest = build.max_seq_len or d.positions
    limit = None if longest is None else longest_scored(d.engine.name, longest, build.max_num_tokens)
    stage = EvaluateReference(d.settings.eval, name, limit, d.device, _warns(d))
    return Node("reference", stage, f"{name}-{REFERENCE}", _asked(d))


def _ask_trtllm_serve(d: Deployment) -> list[Node]:
    """Return the evaluation of a model behind a trtllm-serve that is started for it, after its repository."""
    settings, build, repository = d.settings, d.settings.build, _repository(d)
    longest = build.max_seq_len or d.positions
    stage = EvaluateByTrtllmServe(
        settings.eval,
        settings.model.label,
        None if longest is None else longest_scored(d.engine.name, longest, build.max_num_tokens),
        settings.paths.runs.absolute() / ".answers",
        build.max_input_len if settings.eval.task == PASSKEY else None,
        serving=settings.serving,
        logs=settings.paths.runs.absolute(),
        variant=d.variant.label,
        warns=_warns(d),
    )
    inputs = {"repository": repository.id, **_asked(d)}
    return [repository, Node(f"{d.prefix}evaluate", stage, d.label, inputs)]


def _ask_server(d: Deployment) -> Node:
    """Return the evaluation of a model on a server that runs already."""
    settings, build = d.settings, d.settings.build
    stage = EvaluateServed(
        settings.eval,
        settings.model.label,
        build.max_seq_len or d.positions,
        settings.paths.runs.absolute() / ".answers",
        build.max_input_len if settings.eval.task == PASSKEY else None,
    )
    return Node("evaluate", stage, f"{settings.model.label}-{SERVED_ELSEWHERE}", _asked(d))


def _fidelity(d: Deployment) -> list[Node]:
    """Return the comparison of predictions with those of the reference, after its texts."""
    settings, fidelity = d.settings, d.settings.fidelity
    tokens = fidelity.tokens or (TOKENS_ALONE if d.target == "fidelity" else TOKENS_AMONG_OTHERS)
    variant, reference = settings.variant.label, d.reference_model.label
    stage = Fidelity(**_reading(d, tokens), quant=settings.quant, variant=variant, reference=reference)
    before, texts = _texts(d)
    beside: dict[str, Input] = {name: d.sources[name] for name in ("reference_model",) if name in d.sources}
    inputs = {"engine": engine(d), "reference": engine(d.reference), "model": model(d), **beside, **texts}
    return [*before, Node("fidelity", stage, d.label, inputs)]


def _fidelity_of_server(d: Deployment) -> list[Node]:
    """Return the comparison of a server's predictions with those of the 16-bit engine, after its texts."""
    settings = d.settings
    answers = settings.paths.runs.absolute() / ".answers"
    stage = FidelityServed(**_reading(d, settings.fidelity.tokens or TOKENS_ALONE), eval=settings.eval, answers=answers)
    before, texts = _texts(d)
    inputs = {"engine": engine(d), "model": model(d), **texts}
    return [*before, Node("fidelity", stage, f"{settings.model.label}-{SERVED_ELSEWHERE}", inputs)]


def _reading(d: Deployment, tokens: int) -> dict[str, Any]:
    """Return what both comparisons read texts with."""
    return {
        "engine": d.engine.name,
        "options": d.engine.options_of(d.settings.engine),
        "fidelity": d.settings.fidelity,
        "tokens": tokens,
        "calibration": d.settings.calibration,
        "model": d.settings.model.label,
        "libraries": (*d.engine.run_libraries, "numpy", "transformers", "tokenizers"),
        "needs": (*d.engine.packages, "transformers"),
    }


def _texts(d: Deployment) -> tuple[list[Node], dict[str, Input]]:
    """Return the texts that predictions are compared on, and the download of one that is not here."""
    fidelity = d.settings.fidelity
    names = [name for name in FIDELITY_TEXTS.values() if name in d.sources and name != "calibration"]
    texts: dict[str, Input] = {name: d.sources[name] for name in names}
    if "calibration" in (fidelity.texts or ()) and not (d.settings.calibration.shipped and fidelity.shipped):
        before, text = calibration_text(d)
        return before, texts | text
    return [], texts


def _diagnose(deployment: Deployment) -> list[Node]:
    """Return the diagnosis of what is given, or of what this configuration makes as far as it runs here."""
    # dynamic quantization of activations would look like a fault of the engine
    d = deployment.with_groups(engine=deployment.settings.engine.with_checkpoints_arithmetic())
    settings, diagnose, quantized = d.settings, d.settings.diagnose, quantize(d)
    made, inputs = (list[Node](), dict[str, Input]()) if diagnose.given else _made_here(d)
    if diagnose.given:
        inputs |= {name: d.sources[name] for name in ("checkpoint", "engine", "repository") if name in d.sources}
    if not diagnose.given and diagnose.simulate and quantized.reads_texts:
        before, text = calibration_text(d)
        made, inputs = [*made, *before], inputs | text
    stage = Diagnose(
        diagnose,
        None if diagnose.given else quantized,
        rounding_is_known(settings.quant.qformat, settings.quant.int4_scales),
        settings.eval,
        settings.serving,
        d.engine.name,
        d.engine.options_of(settings.engine),
        settings.model.label,
        "given" if diagnose.given else d.variant.label,
        settings.paths.runs.absolute(),
        d.engine.gives_logits,
        (*d.engine.run_libraries, "numpy", "torch", "transformers", "tokenizers"),
        ("torch", "transformers", *(d.engine.packages if d.engine.gives_logits else ())),
    )
    # it compares layer by layer, so with a model of the same sizes
    pruned = any(node.id == "prune_model" for node in made)
    inputs = {"model": "prune_model" if pruned else model(d), "text.bundled": d.sources["text.bundled"], **inputs}
    return [*made, Node("diagnose", stage, d.label, inputs)]


def _made_here(d: Deployment) -> tuple[list[Node], dict[str, Input]]:
    """Return what is made to be diagnosed, by the names under which the diagnosis reads it."""
    diagnose = d.settings.diagnose
    made = engine_nodes(d) if d.engine.gives_logits else checkpoint_nodes(d)  # other engines run on a GPU machine
    inputs: dict[str, Input] = {"checkpoint": "quantize"}
    for changing in ("prune_model", "sparsify", "recover"):
        if any(node.id == changing for node in made):
            inputs = {"compressed": changing, "checkpoint": "quantize"}
    if d.engine.gives_logits:
        inputs["engine"] = "build"
        if diagnose.serve and d.settings.eval.url is None:
            made = [*made, *draft_nodes(d), _repository(d)]
            inputs["repository"] = "repository"
    return made, inputs


def _repository(d: Deployment) -> Node:
    settings, images, beside = d.settings, d.settings.multimodal, _beside(d)
    whole = str(images.path) if d.engine.example_scripts else ""  # which NVIDIA's code reads while it serves
    encoder = ImageSpec(images.model_type, whole, images.images_per_request)
    adapters: dict[str, Input] = {name: source for name, source in d.sources.items() if name.startswith("lora.")}
    spec = RepositorySpec(
        d.engine.name,
        settings.model.label,
        d.variant.label,
        settings.kv_cache.enable_block_reuse,
        settings.runtime.enable_chunked_context,
        *_ranks(d),
        num_draft_tokens=settings.speculative.num_draft_tokens if "draft_engine" in beside else None,
        images=encoder if "vision_engine" in beside else None,
        lora_tasks=tuple(sorted(int(name.removeprefix("lora.")) for name in adapters)),
        options=all_options(d.engine.options_of(settings.engine)),
    )
    inputs = {"engine": engine(d), "model": model(d), **beside, **adapters}
    return Node(f"{d.prefix}repository", WriteRepository(settings.triton, spec), d.label, inputs)


def _beside(d: Deployment) -> dict[str, Input]:
    """Return the engines besides the model's own that are served."""
    beside: dict[str, Input] = {"draft_engine": "draft.build"} if draft_nodes(d) else {}
    vision = d.target != "diagnose" and vision_nodes(d)
    return beside | ({"vision_engine": "vision"} if vision else {})


def _benchmark(d: Deployment) -> Node:
    settings = d.settings
    libraries = ("tritonclient", *(() if d.is_elsewhere else d.engine.run_libraries))
    stage = Benchmark(
        settings.workload,
        settings.benchmark,
        settings.serving,
        _labels(d),
        d.machine.to_json(),
        settings.paths.runs.absolute(),
        libraries,
        _predicted(d),
        d.picture_tokens,
    )
    if d.is_elsewhere:
        return Node("benchmark", stage, f"{settings.model.label}-elsewhere", {"model": model(d)})
    return Node("benchmark", stage, d.label, {"repository": "repository", "model": model(d)})


def _predicted(d: Deployment) -> dict[str, float]:
    """Return the modelled memory of the engine's process under this load; empty where there is no model."""
    if not d.on_model or d.engine.memory_model != "process":
        return {}
    memory = cpu_reached(d.settings, d.shape)
    return {"total": memory.total, **asdict(memory)} if memory else {}


def _labels(d: Deployment) -> dict[str, Any]:
    """Return the labels of the result; of a server elsewhere, only what the user states is known."""
    if d.is_elsewhere:
        stated = d.settings.benchmark
        return {
            "model": d.settings.model.label,
            "precision": stated.precision or "unknown",
            "engine": "unknown",
            "tp_size": stated.tp_size or 1,
            "world_size": stated.tp_size or 1,
        }
    tp_size, pp_size = _ranks(d)
    gpus, triton = tp_size * pp_size, d.settings.triton
    if d.engine.server is ServerBackend.TENSORRTLLM:  # of all instances together, and of a draft model with its own
        groups = list(triton.gpu_device_ids or (range(gpus),))
        groups += (triton.draft_gpu_device_ids or ()) if "draft_engine" in _beside(d) else ()
        gpus = len({gpu for group in groups for gpu in group})
    return {
        "model": d.settings.model.label,
        "precision": d.variant.label,
        "engine": d.engine.name,
        "tp_size": tp_size,
        "world_size": tp_size * pp_size,
        "gpu_count": gpus,
    }


def _ranks(d: Deployment) -> tuple[int, int]:
    """Return (tp_size, pp_size) of the running engine."""
    if not d.engine.keeps_ranks:
        return 1, 1
    return d.settings.build.tp_size, d.settings.build.pp_size
