"""Refuse before anything is spent: impossible combinations, too little memory or disk, missing packages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipelines.compress.config import ABOUT, CalibrationSettings
from pipelines.document.canvas import missing_packages
from pipelines.document.show import count
from pipelines.domain.errors import Fault, collecting
from pipelines.domain.formats import (
    FORMATS,
    INT4_WEIGHTS,
    QFormat,
    formats_for,
    mix_faults,
    proposed,
    scale_faults,
    tuning_faults,
    version_faults,
)
from pipelines.domain.units import show_bytes
from pipelines.engines.openvino.memory import experts_fault, groups_experts, kv_fault, unheard
from pipelines.engines.registry import OPENVINO, ServerBackend
from pipelines.engines.tensorrt_edge.exporter import environment_fault
from pipelines.engines.tensorrt_llm.llm_api import numbers, tables_of
from pipelines.engines.tensorrt_llm.releases import ABSENT, newer_than_container, newer_than_installed
from pipelines.host.machine import Machine, library_versions
from pipelines.plan import accuracy_checks, memory_checks, other_memory, serving_checks, weights_checks
from pipelines.plan.deployment import Deployment
from pipelines.plan.other_memory import baseline_faults, colocated, draft_faults
from pipelines.plan.targets import COMPARED, EVALUATED, SERVED, STARTED, Goal
from pipelines.plan.user_inputs import ENOUGH_TEXTS, calibrates
from pipelines.predict.performance import gpus
from pipelines.predict.performance.gpus import usable_bytes
from pipelines.predict.performance.limits import request_tokens
from pipelines.rules.record import Alternatives, BrokenRule
from pipelines.rules.rulebook import RULES, check_checkpoint, refused, warned
from pipelines.rules.rulebook import check as check_table
from pipelines.serving.locate import why_no_server
from pipelines.serving.ports import port_faults
from pipelines.serving.trtllm_serve import why_no_trtllm_serve
from pipelines.settings.root import Settings
from pipelines.stages import Stage
from pipelines.stages.evaluate import EvaluateByTrtllmServe
from pipelines.stages.unified import ExportEdge
from triton_repo.config import TritonSettings
from triton_repo.parameters import lone, unread
from triton_repo.tensors import ENCODERS, TENSORRT_LLM

NO_MEMORY = "memory: unknown"
"""Begins the note of a plan that does not know how much memory is needed."""
CPU_WAY = "use engine=openvino, which executes the same checkpoint here; "


@dataclass
class Checked:
    """Result of the checks."""

    faults: list[Fault] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    warnings: tuple[Fault, ...] = ()


def check(d: Deployment) -> Checked:
    """Apply every rule that does not need the model's files; an engine already built is only served."""
    served = _served(d)
    if not d.on_model:
        return Checked(served, _engine_notes(d))
    settings = d.settings
    checked = Checked(notes=_engine_notes(d))
    findings = check_table(d.facts)
    if settings.model.folder is None or "model" in d.sources:  # unreadable files are reported elsewhere
        checked.faults += weights_checks.given_faults(d)
    checked.faults += [*_quant(d), *refused(findings)]
    checked.warnings = (
        *warned(findings),
        *filter(
            None,
            (
                _few_texts(d.settings.calibration, d.inputs.few_texts),
                accuracy_checks.few_questions(d),
                _unknown_tokens(d),
                _newer(d),
            ),
        ),
    )
    checked.faults += [*_baseline(d, findings), *_draft(d), *filter(None, [accuracy_checks.unknown_reference(d)])]
    if not d.is_for_a_named_gpu:
        checked.faults += check_memory(d)
    checked.faults += [*weights_checks.pruning_faults(d), *weights_checks.recovery_faults(d)]
    checked.faults += weights_checks.vision_faults(d)
    of_server = f"{settings.eval.url} is compared: its format is its own, and only the 16-bit model is built"
    checked.notes += (
        *accuracy_checks.sequential_notes(d),
        *((of_server,) if d.compares_server else ()),
        *_text_notes(d),
        *_judged_by(d),
        *_group_notes(d),
        *weights_checks.pruning_notes(d),
        *weights_checks.recovery_notes(d),
    )

    def allowed(change: str) -> bool:
        """Return whether a change breaks no rule besides those broken, and another format none on formats."""
        facts, broken = d.changed(change).tuned.facts, _refusing(findings)
        least = Alternatives(RULES, facts, "quant").whatever & broken if "quant=" in change else broken
        return _refusing(check_table(facts)) <= least

    _gpu_memory(d if d.engine.needs_gpu else d.limited, checked, allowed)
    _host_memory(d, checked)
    checked.faults += served
    return checked


def _refusing(findings: Iterable[BrokenRule]) -> set[str]:
    return {finding.rule.name for finding in findings if not finding.rule.warns}


def _engine_notes(d: Deployment) -> tuple[str, ...]:
    """Name the options that the engine does not read, and say what is not known of one built."""
    notes, triton = [], d.settings.triton
    given = [f"engine.openvino.{name}" for name in d.settings.engine.openvino.model_dump(exclude_defaults=True)]
    given = [] if d.engine is OPENVINO else given
    if d.target in SERVED and d.engine.server is not None:
        given += [f"triton.{name}" for name in unread(triton, d.engine)]
        if d.engine.server is ServerBackend.TENSORRTLLM:
            notes += [f"no effect: triton.{name}, without triton.{other}" for name, other in lone(triton).items()]
    if given:
        notes.append(f"not read by engine={d.engine.setting}: {', '.join(given)}")
    if d.built is not None and d.target in STARTED:
        notes.append(f"{NO_MEMORY}, because engine.path is an engine that is already built")
    return tuple(notes)


def _unknown_tokens(d: Deployment) -> Fault | None:
    """Warn of a model that was saved without the tokens that its tokenizer has."""
    tokens = d.inputs.unknown_tokens
    if not tokens or d.shape is None:
        return None
    names = f"{', '.join(repr(token) for token in tokens[:3])}{', ...' if len(tokens) > 3 else ''}"
    return Fault(
        f"The tokenizer has {count(len(tokens), 'token')} that the model does not know ({names}): their ids are not"
        f" below its vocab_size={d.shape.vocab_size}. Prompts with them are refused.",
        todo="If prompts need them, as a chat template may, call resize_token_embeddings(len(tokenizer)), train"
        " their rows and save the model again.",
    )


def _text_notes(d: Deployment) -> tuple[str, ...]:
    """Name the texts that are observed, and those that predictions are compared on."""
    calibration, fidelity = d.settings.calibration, d.settings.fidelity
    notes = []
    if d.imports:
        notes.append("calibration text: none, because the model is already quantized")
    elif calibrates(d):
        elsewhere = calibration.path or f"{calibration.dataset} on the Hub"
        notes.append(f"calibration text: {ABOUT.get(calibration.source, elsewhere)}")
    elif d.settings.quant.qformat is not QFormat.NONE:
        notes.append(f"calibration text: none, because {d.settings.quant.qformat} rounds weights without one")
    if d.has_fidelity or d.compares_server:
        names = [name for name in fidelity.texts or () if name != "calibration" or not calibration.shipped]
        notes.append(f"fidelity text: {', '.join([*names, *([str(fidelity.path)] if fidelity.path else [])])}")
    if d.settings.multimodal.model_type != "none" and d.settings.is_compressed:
        notes.append(f"vision encoder: 16 bit, as its folder has it; {d.variant.label} is of the language model alone")
    if d.inputs.whole is not None and d.settings.multimodal.model_type == "none" and d.on_model:
        notes.append(f"model: the language model of a {d.inputs.whole} alone; requests with pictures are refused")
    notes += [f"not checked before its download: family, sizes and memory of {reason}" for reason in d.inputs.unread]
    if (encoder := d.encoder) is not None and encoder.grids:
        most, rows = encoder.tiling.most_tiles, d.settings.build.max_prompt_embedding_table_size
        tokens = f"up to {encoder.visual_tokens} tokens of up to {most} tiles, depending on its size"
        notes.append(f"a picture: {tokens}; the engine has room for {rows:,} of all running requests")
    return tuple(notes)


def _judged_by(d: Deployment) -> tuple[str, ...]:
    """Name the versions whose tables judge the options of the LLM API where its own has none."""
    version = d.llm_api.version
    judges = [table.version for table in tables_of(version)] if d.llm_api.others else []
    if judges in ([], [version]):
        return ()
    own = f"of {version}" if version else f"without a version in the tag of {d.settings.image.base_llm_api}"
    return (f"llm_api: judged by the options of TensorRT-LLM {' and '.join(judges)}, because there is no table {own}",)


def _served(d: Deployment) -> list[Fault]:
    """Return the faults that count with an engine already built too."""
    return [
        *serving_checks.check(d),
        *filter(None, [accuracy_checks.question_fault(d) if d.target in EVALUATED else None]),
        *filter(None, [accuracy_checks.nothing_to_do(d, compares=d.has_fidelity and not memory_checks.two_models(d))]),
        *_reported(d),
    ]


def _host_memory(d: Deployment, checked: Checked) -> None:
    """Add what an engine that computes in this process needs of the host's memory."""
    if d.shape is None or d.engine.memory_model != "process":
        return
    needs = memory_checks.cpu_needs(d)
    checked.notes += memory_checks.cpu_notes(needs, request_tokens(d.settings))
    if memory_checks.ENGINE not in needs:
        formats = " and ".join(each for each in d.settings.quant.formats if FORMATS[each].cpu is None)
        checked.notes += (f"{NO_MEMORY}, because the CPU engine's was not measured for {formats}",)
    options = d.settings.engine.openvino
    if d.on_model and d.shape.num_experts > 1:
        grouped = groups_experts(options, d.shape, d.settings.quant.qformat)
        how = "one product for all" if grouped else "products of each"
        checked.notes += (f"experts: {how} (engine.openvino.experts={options.experts})",)
    checked.notes += tuple(filter(None, (memory_checks.logits_note(d), unheard(options))))
    faults = kv_fault(options), experts_fault(options, d.shape, d.settings.quant.qformat)
    checked.faults += filter(None, faults)
    why = memory_checks.two_models(d) if d.has_fidelity else ""
    if why and d.target == "fidelity":
        checked.faults.append(Fault(why, todo="Use a smaller model, or a machine with more memory."))
    elif why:  # `all` goes without
        checked.notes += (f"left out: {why}",)
    if d.target in (*EVALUATED, *STARTED, *COMPARED):
        fit = memory_checks.check_cpu(d.settings, needs, d.machine.memory_bytes)
        checked.faults += fit.faults
        checked.warnings += fit.warnings


def _quant(d: Deployment) -> list[Fault]:
    """Check the candidates of a search and the bits it may spend, the scales, and the version of ModelOpt."""
    quant, family = d.settings.quant, None if d.shape is None else d.shape.family
    faults = [] if quant.effective_bits is None else [*mix_faults(quant.formats, quant.effective_bits)]
    faults += scale_faults(quant.qformat, quant.int4_scales, quant.fp4_inputs)
    if not faults and quant.int4_scales != "max" and family is not None and family.by_tensor and d.engine.writes_engine:
        what = f"quant.int4_scales={quant.int4_scales} needs ModelOpt's export, which {family.title} does not have."
        faults.append(Fault(what, "Without it: quant.int4_scales=max.", "Leave it out."))
    faults += tuning_faults(quant.formats, quant.smoothquant_alpha, quant.awq_alpha_step)
    version = library_versions(("nvidia-modelopt",))["nvidia-modelopt"]
    if version == "absent" or d.quantization is not None:  # another check says where it is needed
        return faults
    return faults + version_faults(version, quant.int4_scales, quant.fp4_inputs)


def _group_notes(d: Deployment) -> Iterator[str]:
    """Say that a size of groups is given to a format that has none, or only its own."""
    quant, draft = d.settings.quant, d.settings.speculative.draft_qformat
    kinds = [FORMATS[each].weights for each in (*quant.formats, *filter(None, (draft,)))]
    size = quant.group_size
    if size != INT4_WEIGHTS.group and all(kind.group_size(size) != size for kind in kinds):
        groups = f"groups of {kinds[0].group}" if kinds[0].group else "no groups"
        yield f"no effect: quant.group_size={size}, because {' and '.join(quant.formats)} has {groups}"


def _newer(d: Deployment) -> Fault | None:
    """Warn of an older TensorRT-LLM than the newest that is known for the engine."""
    image, usual = d.settings.image, type(d.settings.image)()
    if d.engine.server is ServerBackend.LLM_API:
        version, default = image.llm_api_version, usual.llm_api_version
        if version is None or default is None or numbers(version) >= numbers(default):
            return None
        what = f"image.base_llm_api={image.base_llm_api} has TensorRT-LLM {version}, which is older than {default}."
        return Fault(what, f"The default is {usual.base_llm_api}.", "Leave out image.base_llm_api to use it.")
    if not d.engine.builder:
        return None
    installed = library_versions(("tensorrt-llm",))["tensorrt-llm"]
    if newest := newer_than_installed(installed):
        what = f"TensorRT-LLM {installed} is installed; {newest} is the newest that has TensorRT engines."
        return Fault(what, todo=f"Use the container of {usual.base_gpu}: make image.")
    if installed == ABSENT and (newest := newer_than_container(image.base_gpu)):
        what = f"image.base_gpu={image.base_gpu} is older than {newest}, the newest container with TensorRT engines."
        return Fault(what, todo="Leave out image.base_gpu to use that.")
    return None


def _reported(d: Deployment) -> list[Fault]:
    """Refuse a report that could not be logged, or not be compared, before hours are spent on its results."""
    faults: list[Fault] = []
    if d.target == "all" and d.settings.report.mlflow is not None:
        from pipelines.report.mlflow_runs import mlflow_fault  # imports all that a report is made of

        faults += [fault] if (fault := mlflow_fault(d.settings.report.mlflow)) else []
    if d.target == "all" and d.settings.report.against is not None:
        from pipelines.report.stored import earlier_numbers

        with collecting(faults):
            earlier_numbers(d.settings.report.against)
    return faults


def _baseline(d: Deployment, broken: Sequence[BrokenRule]) -> Iterator[Fault]:
    """Apply the rules to the 16-bit baseline, which is built and evaluated but not served."""
    if not d.has_baseline:
        return
    triton = d.settings.triton
    windows = triton.max_attention_window_size if d.shape and d.shape.family.states_window else None
    unserved = TritonSettings(num_nodes=triton.num_nodes, max_attention_window_size=windows)
    alone = d.baseline.with_groups(triton=unserved).tuned
    known_names = {finding.rule.name for finding in broken}
    new = refused([finding for finding in check_table(alone.facts) if finding.rule.name not in known_names])
    ranks = d.settings.eval.baseline_tp_size
    what = f"The 16-bit baseline{f' (eval.baseline_tp_size={ranks})' if ranks else ''}"
    yield from (Fault(f"{what}: {fault.message}", fault.allowed, fault.todo) for fault in new)


def _few_texts(calibration: CalibrationSettings, few: int | None) -> Fault | None:
    """Warn of calibration data with fewer texts than activations should be observed on."""
    if few is None:
        return None
    return Fault(
        f"calibration.path='{calibration.path}' holds {count(few, 'text')}: the observed ranges of activations "
        f"depend on so few.",
        f"At least {ENOUGH_TEXTS} are advisable; calibration.size={calibration.size} would be used.",
        "Add texts, or use calibration=real_text.",
    )


def _pinned(settings: Settings, machine: Machine) -> Iterator[Fault]:
    """Check host memory that the server reserves on this machine for KV blocks and adapters."""
    triton = settings.triton
    reserved = {"kv_cache_host_memory_bytes": triton.kv_cache_host_memory_bytes}
    if settings.lora.adapters:
        reserved["lora_cache_host_memory_bytes"] = triton.lora_cache_host_memory_bytes
    yield from (
        Fault(
            f"triton.{name}={size} is {show_bytes(size)} of host memory; this machine has "
            f"{show_bytes(machine.memory_bytes)}.",
            todo=f"Set triton.{name} lower.",
        )
        for name, size in reserved.items()
        if size > machine.memory_bytes
    )


def _draft(d: Deployment) -> Iterator[Fault]:
    """Check the draft model's format and split; it runs on the GPUs of its target."""
    guess, shape = d.settings.speculative, d.draft_shape
    if guess.draft is None or guess.draft_qformat is None or shape is None:
        return
    quant, build = d.settings.quant, d.settings.build
    if guess.draft_qformat is QFormat.AUTO and not quant.mixed:
        todo = f"Set quant=auto, or speculative.draft_qformat={quant.qformat}."
        yield Fault("speculative.draft_qformat=auto takes the candidates of quant=auto.", todo=todo)
        return
    formats = quant.formats if guess.draft_qformat is QFormat.AUTO else (guess.draft_qformat,)
    built = d.engine.writes_engine
    faults = [
        fault
        for qformat in formats
        for fault in check_checkpoint(
            shape,
            qformat,
            group_size=quant.group_size,
            tp_size=build.tp_size,
            pp_size=build.pp_size,
            positions=d.inputs.draft_rotary,
            needs_gpu=d.engine.needs_gpu if built else None,
            longest=(d.facts.longest or 1) if built else 1,
        )
    ]
    yield from (Fault(f"speculative.draft: {fault.message}", fault.allowed, fault.todo) for fault in faults)


def check_machine(d: Deployment, stages: Sequence[Stage]) -> list[Fault]:
    """Return why an engine cannot be built and evaluated on this machine; `plan` can still describe it."""
    engine = d.engine
    used = any(stage.name in ("convert", "vision", "build", "evaluate") for stage in stages)
    if not engine.builder or not used:
        return []
    lacks = engine.lacks(d.machine)
    hardware, gpus_here = d.settings.hardware, d.machine.gpus
    if not lacks and (hardware.name == "auto" or any(gpus.is_a(gpu, hardware) for gpu in gpus_here)):
        return []
    if not lacks:
        return [
            Fault(
                f"hardware={hardware.name} is not here: this machine has {gpus_here[0].name}.",
                "A TensorRT engine is built on the GPU it is for.",
                "Run the same command there, or leave out hardware=... to build for the GPU of this machine.",
            )
        ]
    on_cpu = replace(d, engine=OPENVINO, limits=None).tuned
    return [
        Fault(
            f"engine={engine.setting} cannot run here: {'; '.join(lacks)}.",
            engine.place,
            f"Run the same command there (make shell); {'' if check(on_cpu).faults else CPU_WAY}"
            f"or serve an engine that is already built with engine.path=/its/folder.",
        )
    ]


def check_memory(d: Deployment) -> list[Fault]:
    """Check the memory of this machine, where the engine is built here: on a machine without a GPU it is not."""
    faults = other_memory.check(d) if not d.engine.builder or d.machine.gpus else []
    return faults + ([*_pinned(d.settings, d.machine)] if d.engine.needs_gpu and d.machine.gpus else [])


def _gpu_memory(d: Deployment, checked: Checked, allowed: Callable[[str], bool]) -> None:
    """Check every engine of the plan against the memory of the GPU."""
    gpu, settings = d.gpu, d.settings
    if about := gpus.describe(settings.hardware, d.machine):
        checked.notes += (about,)
    if d.engine.on_device:
        checked.notes += (f"memory and speed on the device: unknown; {d.engine.title} is not modelled",)
        return
    if d.shape is None or not gpu.memory_gb:
        return
    if d.limits is not None:
        checked.notes += tuple(f"chosen for the load: build.{line}" for line in d.limits.lines())
    chosen = () if d.limits is None else tuple(d.limits.reasons)
    total, name = usable_bytes(gpu), memory_checks.gpu_name(gpu)
    alone = [*draft_faults(d, total, name)]
    beside = [] if alone else colocated(d)
    formats = proposed(formats_for(gpu.sm or 0))
    fit = memory_checks.check(settings, d.shape, gpu, formats, beside, allowed, chosen)
    checked.faults += [*fit.faults, *alone, *baseline_faults(d, total, name)]
    checked.notes += fit.notes
    checked.warnings += fit.warnings
    if settings.multimodal.model_type != "none" and d.target in SERVED and not d.inputs.vision_bytes:
        checked.notes += ("the vision encoder's memory is not known: its folder has no weights of one in safetensors",)
    if settings.speculative.heads_path is not None and d.target in SERVED and not d.inputs.heads_bytes:
        checked.notes += ("the memory of the draft heads is not known: speculative.heads_path has no weights",)


def check_installed(goal: Goal, stages: Sequence[Stage], only: str | None) -> tuple[Fault, ...]:
    """Check that the packages are installed that the stages that will run need, and a server where one is started.

    A server that is given by its path is a setting like others, and is judged with them.
    """
    users: dict[str, set[str]] = {}
    for stage in stages:
        for package in stage.needs:
            users.setdefault(package, set()).add(stage.name)
    packages = [
        fault
        for package, names in sorted(users.items())
        for fault in missing_packages(f"Stage {', '.join(sorted(names))}", (package,))
    ]
    starts, serving = goal.target in STARTED and only in (None, "benchmark"), goal.settings.serving
    starts = starts and not goal.is_elsewhere and serving.tritonserver is None
    starts = starts or any(isinstance(stage, EvaluateByTrtllmServe) for stage in stages)
    server = None
    if starts:
        server = why_no_trtllm_serve() if serving.server == "trtllm_serve" else why_no_server(serving)
    exporters = [environment_fault(stage.environment) for stage in stages if isinstance(stage, ExportEdge)]
    reports = missing_packages() if goal.target == "all" and only is None else []
    return (*packages, *reports, *filter(None, [server, *exporters]))


def check_code(d: Deployment, repository: Path | None) -> tuple[Fault, ...]:
    """Check that NVIDIA's code was added to a repository that needs it, if a tritonserver is to be started on it."""
    llm_api = d.engine.server is ServerBackend.LLM_API
    sees = d.engine.server is ServerBackend.TENSORRTLLM and d.settings.multimodal.model_type != "none"
    triton = (llm_api or sees) and d.settings.serving.server == "tritonserver"
    if d.target not in STARTED or d.is_elsewhere or not triton:
        return ()
    if repository is not None and (repository / (ENCODERS if sees else TENSORRT_LLM) / "1" / "model.py").is_file():
        return ()
    of = f"the images of engine={d.engine.setting}" if sees else f"engine={d.engine.setting}"
    what = f"tritonserver needs NVIDIA's code for {of}, which a repository made here does not have"
    other = "" if sees else "Add serving.server=trtllm_serve. Or "
    way = f"{other}make the repository first, and copy it as the commands in its repository.json do: make repository"
    return (Fault(f"{what}.", todo=f"{way[0].upper()}{way[1:]}"),)


def check_ports(goal: Goal, stages: Sequence[Stage]) -> tuple[Fault, ...]:
    """Check that a server can listen where it is told to; one that is only measured takes ports that are free then."""
    if goal.target not in STARTED or goal.is_elsewhere:
        return ()
    serving = goal.settings.serving
    faults = port_faults(serving if goal.target == "serve" else serving.on_free_ports)
    way = ". To build while it is in use: make repository" if stages else ""
    return tuple(replace(fault, todo=f"{fault.todo}{way}") if fault.todo else fault for fault in faults)


def output_folders(goal: Goal, store: Path, *, makes: bool) -> dict[str, Path]:
    """Return the folders that a run writes to, by the setting that names each."""
    folders = {"paths.store": store} if makes else {}
    folders["paths.runs"] = goal.settings.paths.runs
    if goal.target == "all":
        folders |= goal.settings.report.written
    return folders
