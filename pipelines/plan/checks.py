"""Refuse before anything is spent: impossible combinations, too little memory or disk, missing packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eval.dataset import LAYOUT, complete_subjects
from eval.spec import BUNDLED, JSON_VALIDITY, MMLU, TASK_SIZES, WRITTEN, task_fault
from pipelines.document.show import count
from pipelines.domain.errors import Fault
from pipelines.domain.formats import (
    QFormat,
    formats_for,
    group_instead,
    mix_faults,
    proposed,
    scale_faults,
    version_faults,
)
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.units import show_bytes
from pipelines.engines.config import HardwareSettings
from pipelines.engines.openvino.memory import unheard
from pipelines.engines.registry import EngineDescription
from pipelines.host.machine import Machine, library_versions
from pipelines.plan import host_memory, memory_checks, serving_checks
from pipelines.plan.accuracy_checks import chat_fault, few_questions, nothing_to_do, sequential_notes, unknown_reference
from pipelines.plan.engine_flow import tune
from pipelines.plan.given_checks import given_faults, is_given
from pipelines.plan.neighbours import baseline_faults, draft_faults, neighbours
from pipelines.plan.pruning_checks import pruning_faults, pruning_notes
from pipelines.plan.recovery_checks import recovery_faults, recovery_notes
from pipelines.plan.targets import (
    COMPARED,
    EVALUATED,
    SERVED,
    STARTED,
    Target,
    compares_server,
    has_baseline,
    has_fidelity,
    is_elsewhere,
)
from pipelines.plan.user_inputs import ENOUGH_TEXTS, Found, deployment, text_notes
from pipelines.predict.performance import gpus
from pipelines.predict.performance.gpus import usable_bytes
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.rules.record import BrokenRule, Severity
from pipelines.rules.rulebook import check as check_table
from pipelines.rules.rulebook import check_checkpoint, refused, refused_whatever_format, warned
from pipelines.serving.locate import why_no_server
from pipelines.settings.root import Settings
from pipelines.stages import Stage
from triton_repo.config import TritonSettings

CPU_WAY = "use engine=openvino, which executes the same checkpoint here; "


@dataclass
class Checked:
    """Result of the checks.

    Attributes:
        faults: reasons to refuse the run.
        notes: what fits where.
        warnings: valid, but perhaps not what the user meant.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    warnings: tuple[Fault, ...] = ()


def check(
    settings: Settings,
    shape: ModelShape | None,
    engine: EngineDescription,
    machine: Machine,
    target: Target,
    found: Found,
    limits: ChosenLimits | None = None,
    on_gpu: Settings | None = None,
) -> Checked:
    """Apply every rule that does not need the model's files.

    Args:
        settings: the configuration.
        shape: of the model, where known.
        engine: the chosen engine.
        machine: facts of this machine.
        target: of the command.
        found: what the user has on disk; with an engine already built, nothing is compressed or built.
        limits: of an engine on the GPU, where they were chosen for the load.
        on_gpu: the configuration with these limits, whatever the engine.
    """
    served = _served(settings, shape, engine, machine, target, found)
    if found.built is not None or is_elsewhere(settings, target):
        return Checked(served)
    checked = Checked()
    findings = check_table(deployment(settings, shape, engine, machine, found))
    if settings.model.folder is None or "model" in found.sources:  # what cannot be read has been named already
        checked.faults += given_faults(settings, engine, target)
    checked.faults += [*_quant(settings), *refused(findings)]
    checked.warnings = (*warned(findings), *_few_texts(settings, found), *few_questions(settings, target))
    checked.faults += [*_baseline(settings, shape, engine, machine, target, found, findings), *_draft(settings, found)]
    checked.faults += unknown_reference(settings, target)
    if not is_for_a_named_gpu(settings, engine):
        checked.faults += check_memory(settings, shape, engine, machine, target)
    checked.faults += pruning_faults(settings, shape, engine, machine.memory_bytes)
    checked.faults += recovery_faults(settings, shape, engine, machine)
    of_server = f"{settings.eval.url} is compared: its format is its own, and only the 16-bit model is built"
    checked.notes += (
        *sequential_notes(settings, target),
        *((of_server,) if compares_server(settings, target) else ()),
        *text_notes(settings, target, engine),
        *pruning_notes(settings, shape),
        *recovery_notes(settings, shape, machine),
    )
    known = {finding.rule.name for finding in findings if finding.rule.severity is Severity.REFUSE}

    def allowed(change: str) -> bool:
        """Return whether a change of the settings breaks no further rule, and another format none on formats."""
        changed = tune(with_changes(settings, change), engine, shape, machine)
        facts = deployment(changed, shape, engine, machine, found)
        least = refused_whatever_format(facts) & known if "quant=" in change else known
        return {
            finding.rule.name for finding in check_table(facts) if finding.rule.severity is Severity.REFUSE
        } <= least

    _gpu_memory(on_gpu or settings, shape, machine, target, found, checked, limits, allowed)
    _host_memory(settings, shape, engine, machine, target, checked)
    checked.faults += served
    return checked


def _served(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, target: Target,
    found: Found,
) -> list[Fault]:  # fmt: skip
    """Return the faults that count with an engine already built too."""
    return [
        *serving_checks.check(settings, shape, engine, target, found.built),
        *(_questions(settings, target, found) if target in EVALUATED else ()),
        *nothing_to_do(settings, target, compares=_compares(settings, shape, engine, machine, target)),
        *_logged(settings, target),
    ]


def _host_memory(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, target: Target,
    checked: Checked,
) -> None:  # fmt: skip
    """Add what an engine that computes in this process needs of the host's memory."""
    if shape is None or engine.memory_model != "process":
        return
    checked.notes += memory_checks.cpu_note(settings, shape)
    checked.notes += (note,) if (note := unheard(settings.engine.openvino)) else ()
    if has_fidelity(settings, target, engine):
        _two_models(settings, shape, machine, target, checked)
    if target in (*EVALUATED, *STARTED, *COMPARED):
        fit = memory_checks.check_cpu(settings, shape, machine.memory_bytes)
        checked.faults += fit.faults
        checked.warnings += fit.warnings


def _quant(settings: Settings) -> list[Fault]:
    """Check the candidates of a search and the bits it may spend, the scales, and the version of ModelOpt."""
    quant, drafts = settings.quant, settings.speculative.draft_qformat
    faults = mix_faults(quant.formats, quant.effective_bits) if quant.effective_bits is not None else []
    faults += scale_faults(quant.qformat, quant.int4_scales, quant.fp4_inputs)
    version = library_versions(("nvidia-modelopt",))["nvidia-modelopt"]
    if version == "absent" or is_given(settings):  # another check says where it is needed
        return faults
    wanted = {(qformat, quant.int4_scales, quant.fp4_inputs) for qformat in quant.formats}
    wanted |= {(drafts, "max", "max")} if drafts else set()
    return faults + [fault for qformat, *ways in sorted(wanted) for fault in version_faults(qformat, version, *ways)]


def _logged(settings: Settings, target: Target) -> list[Fault]:
    """Refuse to log results that nothing could log, before hours are spent on them."""
    if target != "all" or settings.report.mlflow is None:
        return []
    from pipelines.report.mlflow_runs import mlflow_fault  # imports all that a report is made of

    return [fault] if (fault := mlflow_fault(settings.report.mlflow)) else []


def _compares(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, target: Target
) -> bool:
    """Return whether predictions are compared, and this machine has the memory for it."""
    return has_fidelity(settings, target, engine) and not memory_checks.two_models(
        settings, shape, machine.memory_bytes
    )


def _two_models(settings: Settings, shape: ModelShape, machine: Machine, target: Target, checked: Checked) -> None:
    """Check the memory of two models at a time: `fidelity` is refused without it, and `all` leaves that part out."""
    why = memory_checks.two_models(settings, shape, machine.memory_bytes)
    if why and target == "fidelity":
        checked.faults.append(Fault(why, todo="Use a smaller model, or a machine with more memory."))
    elif why:
        checked.notes += (f"left out: {why}",)


def _questions(settings: Settings, target: Target, found: Found) -> list[Fault]:
    """Check that the task is known and that its questions can be had."""
    asked = settings.eval
    if asked.url is not None and target != "evaluate":
        return [
            Fault(
                f"eval.url='{asked.url}' only works with `make evaluate`, `make fidelity` and `make diagnose`.",
                todo="Leave eval.url out.",
            )
        ]
    if asked.url is not None and asked.baseline == "hugging_face":
        return [
            Fault(
                "eval.baseline=hugging_face is not evaluated beside a server (eval.url).",
                todo="Evaluate it by itself, without eval.url.",
            )
        ]
    if asked.guided and asked.task != JSON_VALIDITY:
        return [
            Fault(
                f"eval.guided=true has no effect on eval.task='{asked.task}', whose questions have no JSON schema.",
                todo="Leave it out, or set eval=json_validity.",
            )
        ]
    if asked.baseline == "hugging_face" and asked.task in WRITTEN:
        return [
            Fault(
                f"eval.baseline=hugging_face scores choices; the answers of eval.task='{asked.task}' are written.",
                todo="Leave eval.baseline out.",
            )
        ]
    if asked.is_auto:
        return []
    if fault := task_fault(asked.task) or chat_fault(asked, found):
        return [fault]
    if asked.task == MMLU and asked.dataset_path is not None:
        subjects, complete = TASK_SIZES[MMLU][0], complete_subjects(asked.dataset_path.expanduser())
        if complete < subjects:
            what = (
                f"eval.dataset_path='{asked.dataset_path}' has {complete} subjects with questions; mmlu has {subjects}."
            )
            return [Fault(what, LAYOUT, "Give a complete copy, or set eval= to the task whose questions it has.")]
    if asked.task in BUNDLED or asked.dataset or asked.dataset_path or asked.path:
        return []
    return [
        Fault(
            f"eval.task='{asked.task}' has no data: eval.dataset and eval.dataset_path are null.",
            todo="Set eval.dataset to the task's data set on the Hub, or eval.dataset_path to a copy of it.",
        )
    ]


def _baseline(
    settings: Settings,
    shape: ModelShape | None,
    engine: EngineDescription,
    machine: Machine,
    target: Target,
    found: Found,
    known: Sequence[BrokenRule],
) -> list[Fault]:
    """Apply the rules to the 16-bit baseline, which is built and evaluated but not served."""
    if not has_baseline(settings, target):
        return []
    original = shape.unpruned if shape else None
    alone = settings.baseline().model_copy(update={"triton": TritonSettings(num_nodes=settings.triton.num_nodes)})
    findings = check_table(deployment(tune(alone, engine, original, machine), original, engine, machine, found))
    told = {finding.rule.name for finding in known}
    new = refused([finding for finding in findings if finding.rule.name not in told])
    ranks = settings.eval.baseline_tp_size
    what = f"The 16-bit baseline{f' (eval.baseline_tp_size={ranks})' if ranks else ''}"
    return [Fault(f"{what}: {fault.message}", fault.allowed, fault.todo) for fault in new]


def _few_texts(settings: Settings, found: Found) -> list[Fault]:
    """Warn of calibration data with fewer texts than activations should be observed on."""
    if found.few_texts is None:
        return []
    texts = count(found.few_texts, "text")
    return [
        Fault(
            f"calibration.path='{settings.calibration.path}' holds {texts}: the observed ranges of activations depend "
            f"on so few.",
            f"At least {ENOUGH_TEXTS} are advisable; calibration.size={settings.calibration.size} would be used.",
            "Add texts, or use calibration=real_text.",
        )
    ]


def _pinned(settings: Settings, machine: Machine) -> list[Fault]:
    """Check host memory that the server reserves on this machine for KV blocks and adapters."""
    triton = settings.triton
    asked = {"kv_cache_host_memory_bytes": triton.kv_cache_host_memory_bytes}
    if settings.lora.adapters:
        asked["lora_cache_host_memory_bytes"] = triton.lora_cache_host_memory_bytes
    return [
        Fault(
            f"triton.{name}={size} is {show_bytes(size)} of host memory; this machine has "
            f"{show_bytes(machine.memory_bytes)}.",
            todo=f"Set triton.{name} lower.",
        )
        for name, size in asked.items()
        if size > machine.memory_bytes
    ]


def _draft(settings: Settings, found: Found) -> list[Fault]:
    """Check the draft model's format and split; it runs on the GPUs of its target."""
    guess = settings.speculative
    if guess.draft is None or guess.draft_qformat is None:
        return []
    shape = found.draft or guess.draft_shape
    if shape is None:
        return []
    quant, build = settings.quant, settings.build
    if guess.draft_qformat is QFormat.AUTO and not quant.mixed:
        todo = f"Set quant=auto, or speculative.draft_qformat={quant.qformat}."
        return [Fault("speculative.draft_qformat=auto takes the candidates of quant=auto.", todo=todo)]
    formats = quant.formats if guess.draft_qformat is QFormat.AUTO else (guess.draft_qformat,)
    faults = [
        fault
        for qformat in formats
        for fault in check_checkpoint(
            shape,
            qformat,
            group_size=quant.group_size,
            tp_size=build.tp_size,
            pp_size=build.pp_size,
            positions=found.draft_rotary,
        )
    ]
    return [Fault(f"speculative.draft: {fault.message}", fault.allowed, fault.todo) for fault in faults]


def check_machine(
    engine: EngineDescription,
    machine: Machine,
    stages: Sequence[Stage],
    wanted: HardwareSettings,
    on_cpu: Callable[[], bool],
) -> list[Fault]:
    """Find what keeps an engine from being built and evaluated on this machine; `plan` can still describe it.

    Args:
        engine: the chosen engine.
        machine: facts of this machine.
        stages: that would run.
        wanted: the GPU that was planned for.
        on_cpu: whether the CPU engine takes the same configuration here.
    """
    used = any(stage.name in ("convert", "vision", "build", "evaluate") for stage in stages)
    if not engine.builder or not used:
        return []
    lacks = engine.lacks(machine)
    if not lacks:
        return _other_gpu(machine, wanted)
    return [
        Fault(
            f"engine={engine.setting} cannot run here: {'; '.join(lacks)}.",
            engine.place,
            f"Run the same command there (make shell); {CPU_WAY if on_cpu() else ''}"
            f"or serve an engine that is already built with engine.path=/its/folder.",
        )
    ]


def _other_gpu(machine: Machine, wanted: HardwareSettings) -> list[Fault]:
    """Refuse to build on another kind of GPU than the one that was planned for."""
    if wanted.name == "auto" or any(gpus.is_a(gpu, wanted) for gpu in machine.gpus):
        return []
    return [
        Fault(
            f"hardware={wanted.name} is not here: this machine has {machine.gpus[0].name}.",
            "A TensorRT engine is built on the GPU it is for.",
            "Run the same command there, or leave out hardware=... to build for the GPU of this machine.",
        )
    ]


def is_for_a_named_gpu(settings: Settings, engine: EngineDescription) -> bool:
    """Return whether a GPU is planned for by name, which may be in another machine."""
    return bool(engine.builder) and settings.hardware.name != "auto"


def check_memory(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, target: Target
) -> list[Fault]:
    """Check the memory of this machine, where the engine is built here: on a machine without a GPU it is not."""
    faults = []
    if not engine.builder or machine.gpus:
        faults += host_memory.check(settings, shape, machine, target)
    return faults + (_pinned(settings, machine) if engine.needs_gpu and machine.gpus else [])


def with_changes(settings: Settings, change: str) -> Settings:
    """Return the settings with overrides such as "build.tp_size=2 quant=fp8", as messages propose them."""
    for word in change.split():
        key, _, value = word.partition("=")
        group, _, name = key.partition(".")
        held = getattr(settings, group)
        name = name or {"quant": "qformat", "kv_cache": "dtype"}[group]
        values = held.model_dump(by_alias=True, exclude_none=True, exclude_unset=True) | {name: value}
        if name == "qformat":  # as the file of the other format does
            values["group_size"] = group_instead(held.qformat, held.group_size, QFormat(value))
            values = {key: given for key, given in values.items() if key not in held.SEARCH}
        changed = type(held).judged(values, f"{group}.")
        settings = settings.model_copy(update={group: changed})
    return settings


def _gpu_memory(
    settings: Settings,
    shape: ModelShape | None,
    machine: Machine,
    target: Target,
    found: Found,
    checked: Checked,
    limits: ChosenLimits | None,
    allowed: Callable[[str], bool],
) -> None:
    """Check every engine of the plan against the memory of the GPU."""
    gpu = gpus.resolved(settings.hardware, machine)
    if about := gpus.describe(settings.hardware, machine):
        checked.notes += (about,)
    if shape is None or not gpu.memory_gb:
        return
    if limits is not None:
        checked.notes += tuple(f"chosen for the load: build.{line}" for line in limits.lines())
    chosen = () if limits is None else tuple(limits.reasons)
    total, name = usable_bytes(gpu), memory_checks.gpu_name(gpu)
    alone = draft_faults(settings, target, found, total, name)
    beside = [] if alone else neighbours(settings, target, found)
    fit = memory_checks.check(settings, shape, gpu, proposed(formats_for(gpu.sm or 0)), beside, allowed, chosen)
    checked.faults += [*fit.faults, *alone]
    checked.faults += baseline_faults(settings, target, shape, total, name, gpu.gpus_per_server)
    checked.notes += fit.notes
    checked.warnings += fit.warnings
    if settings.multimodal.model_type != "none" and target in SERVED and not found.vision_bytes:
        checked.notes += ("the vision encoder's memory is not known: its folder has no weights of one in safetensors",)
    if settings.speculative.heads_path is not None and target in SERVED and not found.heads_bytes:
        checked.notes += ("the memory of the draft heads is not known: speculative.heads_path has no weights",)


def check_installed(settings: Settings, target: Target, stages: Sequence[Stage], only: str | None) -> tuple[Fault, ...]:
    """Check that the packages are installed that the stages that will run need, and a server where one is started.

    A server that is given by its path is a setting like others, and is judged with them.

    Args:
        settings: the configuration.
        target: of the command.
        stages: that will run.
        only: the stage that is wanted, if not the whole plan.
    """
    packages = [_missing(package, stages) for package in sorted(_absent(stages))]
    starts = target in STARTED and only in (None, "benchmark") and not is_elsewhere(settings, target)
    server = why_no_server(settings.serving) if starts and settings.serving.tritonserver is None else None
    return (*packages, *([server] if server else ()))


def _absent(stages: Iterable[Stage]) -> set[str]:
    return {package for stage in stages for package in stage.needs if importlib.util.find_spec(package) is None}


def _missing(package: str, stages: Sequence[Stage]) -> Fault:
    users = sorted({stage.name for stage in stages if package in stage.needs})
    return Fault(
        f"Stage {', '.join(users)} needs the Python package '{package}', which is not installed.",
        todo="Run: make setup",
    )


def output_folders(settings: Settings, target: Target, store: Path, *, makes: bool) -> dict[str, Path]:
    """Return the folders that a run writes to, by the setting that names each.

    Args:
        settings: the configuration.
        target: of the command.
        store: of artifacts.
        makes: whether an artifact is made.
    """
    folders = {"paths.store": store} if makes else {}
    folders["paths.runs"] = settings.paths.runs
    if target == "all":
        folders |= settings.report.written
    return folders
