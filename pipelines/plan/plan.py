"""Turn settings into a plan: which stages run, which are cached, and why.

No torch; nothing is written except the cache of file hashes. The Hub is asked only for `eval=auto` of a model that is
not bundled: whether it has the questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

from pipelines.domain.errors import Fault, UserError, collecting
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import OPENVINO, EngineChoice, EngineDescription, choose
from pipelines.host.disk import no_folders, relative_to_cwd, unwritable_folders
from pipelines.host.machine import Machine, library_versions
from pipelines.plan import checks, host_memory
from pipelines.plan.accuracy_checks import WITHOUT_QUESTIONS
from pipelines.plan.engine_flow import Node, tune, tuning_notes
from pipelines.plan.flow import needed_for, nodes
from pipelines.plan.targets import EVALUATED, Target, compares_server, has_baseline, is_elsewhere, is_unasked
from pipelines.plan.user_inputs import Found, look
from pipelines.predict.performance.gpus import resolved
from pipelines.predict.performance.limits import ChosenLimits, with_limits
from pipelines.settings.root import Settings
from pipelines.stages import Stage
from pipelines.stages.download import Download
from pipelines.stages.prune_model import pruning_spec
from pipelines.store.manifest import DamagedError
from pipelines.store.sources import InputSource
from pipelines.store.store import Artifact, Store, canonical, fingerprint


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One node of the plan, and what will happen to it.

    Attributes:
        node: the stage and its inputs.
        state: "cached"; "run"; or "waits" if an earlier stage runs first, after which it may turn out to be cached.
        key: of its artifact, if all inputs are known.
        artifact: the finished artifact, if cached.
        why: which input or setting is new, for messages.
        last_seconds: how long this stage took last time for this label, or None.
    """

    node: Node
    state: Literal["cached", "run", "waits"]
    key: str | None
    artifact: Artifact | None
    why: str
    last_seconds: float | None


@dataclass(frozen=True)
class Plan:
    """Everything a run needs to know before it starts.

    Attributes:
        not_here: what keeps it from running on this machine; it can still be described.
        missing: likewise, what this machine could have: packages, and a tritonserver.
        only: the stage that is wanted, if the plan holds no more than this stage and what it needs.
    """

    settings: Settings
    target: Target
    machine: Machine
    choice: EngineChoice
    shape: ModelShape | None
    steps: tuple[PlannedStep, ...]
    notes: tuple[str, ...]
    warnings: tuple[Fault, ...] = ()
    not_here: tuple[Fault, ...] = ()
    missing: tuple[Fault, ...] = ()
    only: str | None = None

    @property
    def command(self) -> str:
        """Command that runs this plan."""
        return self.target if self.only is None else "stage"

    @property
    def refusals(self) -> tuple[Fault, ...]:
        """Why it does not run on this machine, if it does not."""
        return self.not_here + self.missing

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(step.state == "cached" for step in self.steps)


def make_plan(settings: Settings, target: Target, store: Store, machine: Machine, only: str | None = None) -> Plan:
    """Check everything that can be known now, and find what is already made.

    Args:
        settings: the configuration.
        target: how far to go.
        store: of artifacts.
        machine: facts of this machine.
        only: leave out everything but this stage and what it needs.

    Raises:
        UserError: every fault found, at once.
    """
    faults = no_folders(checks.output_folders(settings, target, store.root, makes=True))
    shape = settings.model.shape.to_shape() if settings.model.shape else None
    found = Found()
    settings, questions = with_questions(settings, target, store)
    try:
        found = look(settings, target, store.hashes)
        if found.shape and shape and found.shape != shape:
            faults.append(_wrong_shape(settings, shape, found.shape))
        shape = found.shape or shape
    except UserError as error:
        faults.extend(error.faults)
    if compares_server(settings, target):  # its format is its own
        settings = settings.baseline()
    with collecting(faults):
        shape = _pruned(settings, shape, from_model=found.built is None and not is_elsewhere(settings, target))
    choice = choose(found.built.flavour if found.built else settings.engine.name, machine, settings.hardware.name)
    settings, tuning = _tuned(settings, choice.engine, shape, machine, target, found)
    limits = None
    if found.built is None:
        with collecting(faults):
            limits = _limits(settings, shape, machine)
    on_gpu = with_limits(settings, limits)
    settings = on_gpu if choice.engine.needs_gpu else settings
    checked = checks.check(settings, shape, choice.engine, machine, target, found, limits, on_gpu)
    faults.extend(checked.faults)
    if faults:
        raise UserError.of(faults)
    draft = found.draft or settings.speculative.draft_shape
    made = nodes(settings, target, choice.engine, found.sources, shape, machine, found.built, draft, found.reference)
    if only is not None:
        made = needed_for(made, only)
    steps = _resolve(made, store)
    todo = [step.node.stage for step in steps if step.state != "cached"]
    unwritable = unwritable_folders(checks.output_folders(settings, target, store.root, makes=bool(todo)))
    if only is not None and (faults := host_memory.check_stages(settings, shape, machine, todo)):
        raise UserError.of(faults)
    store.hashes.save()
    on_model = found.built is None and not is_elsewhere(settings, target)
    not_here = _not_here(settings, shape, choice.engine, machine, target, found, todo, on_model=on_model)
    memory = host_memory.quantize_note(shape, settings) if any(stage.name == "quantize" for stage in todo) else ()
    # what cannot run here at all runs where the rest is, too
    missing = () if not_here else checks.check_installed(settings, target, todo, only)
    notes, warnings = (*questions, *checked.notes, *memory, *tuning), (*checked.warnings, *unwritable)
    findings = notes, warnings, (*not_here, *unwritable), missing
    return Plan(settings, target, machine, choice, shape, steps, *findings, only)


def _tuned(
    settings: Settings, engine: EngineDescription, shape: ModelShape | None, machine: Machine, target: Target,
    found: Found,
) -> tuple[Settings, tuple[str, ...]]:  # fmt: skip
    """Return the tuned settings and the plan's notes on them; with a built engine only the server is left to tune."""
    tuned = tune(settings, engine, shape, machine)
    if found.built is not None:
        return settings.model_copy(update={"triton": tuned.triton}), ()
    return tuned, tuning_notes(tuned, engine, shape, machine, baseline=has_baseline(tuned, target))


def _not_here(
    settings: Settings, shape: ModelShape | None, engine: EngineDescription, machine: Machine, target: Target,
    found: Found, todo: Sequence[Stage], *, on_model: bool,
) -> list[Fault]:  # fmt: skip
    """Return why this machine cannot run it; on_model: compression and build are part of it."""
    not_here = checks.check_machine(
        engine,
        machine,
        todo,
        settings.hardware,
        on_cpu=lambda: (
            not checks.check(tune(settings, OPENVINO, shape, machine), shape, OPENVINO, machine, target, found).faults
        ),
    )
    if not not_here and on_model and checks.is_for_a_named_gpu(settings, engine):
        not_here = checks.check_memory(settings, shape, engine, machine, target)
    return not_here


def with_questions(settings: Settings, target: Target, store: Store) -> tuple[Settings, tuple[str, ...]]:
    """Return the settings with the questions that eval=auto stands for, and a line for the plan.

    Where there are none the task remains `auto`. A bundled model's were chosen when the settings were read.
    """
    asked = settings.eval
    if target not in EVALUATED or not asked.is_auto:
        return settings, ()
    real = asked.as_mmlu()
    data = Download(str(real.dataset), str(real.revision), "dataset")
    # a model from the Hub comes with the same connection
    known = settings.model.folder is None or asked.dataset_path is not None or _in_store(data, store)
    if not (why := "" if known else _not_on_hub(data.repo_id, data.revision)):
        compared = " and fidelity" if real.fidelity else ""
        note = f"questions: mmlu{compared}, as for every model that is not bundled, unless eval= says otherwise"
        return settings.model_copy(update={"eval": real}), (note,)
    settings = settings.model_copy(update={"eval": asked.with_fidelity()})
    verdict = ", and the verdict is NOT MEASURED" if is_unasked(settings, target) else ""
    return settings, (f"questions: none{verdict}, because there is no mmlu here: {why} {WITHOUT_QUESTIONS}",)


def _in_store(data: Download, store: Store) -> bool:
    """Return whether an earlier run downloaded the data."""
    try:
        return store.find(data.name, node_key(Node("download.eval", data, "", {}), {})[0]) is not None
    except DamagedError:  # made again
        return False


@cache
def _not_on_hub(repo_id: str, revision: str) -> str:
    """Return why the Hub, or offline its cache, does not give a data set; empty if it does."""
    if find_spec("huggingface_hub") is None:
        return ""  # the plan names the package as missing
    from pipelines.hub import HubSource, why_not  # takes a third of a second

    return why_not(HubSource(repo_id, revision, "dataset"))


def _pruned(settings: Settings, shape: ModelShape | None, *, from_model: bool) -> ModelShape | None:
    """Return the shape that every later stage sees, where the model's is known.

    Raises:
        UserError: the model cannot be pruned to these sizes.
    """
    if not settings.prune.prunes or shape is None or not from_model:
        return shape
    return pruning_spec(settings.prune).applied(shape)


def _limits(settings: Settings, shape: ModelShape | None, machine: Machine) -> ChosenLimits | None:
    """Choose the limits of an engine on the GPU that is named or found, if its speed is known."""
    hardware = resolved(settings.hardware, machine)
    if hardware.mem_bw_gb_s is None:
        return None
    # the performance model needs numpy, which takes a while to load
    from pipelines.predict.performance.deployment import costs
    from pipelines.predict.performance.placement import limits_for_load

    return limits_for_load(settings, shape, hardware, costs(settings))


def node_key(node: Node, digests: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the key of a node's artifact, and the parts it is computed from.

    Args:
        node: stage and inputs.
        digests: content digest of every input by its name.

    Returns:
        64 hex digits, and {"stage", "version", "settings", "libraries", "inputs"}.
    """
    parts: dict[str, Any] = {
        "stage": node.stage.name,
        "version": node.stage.version,
        "settings": node.stage.identity(),
        "libraries": library_versions(node.stage.libraries),
        "inputs": dict(digests),
    }
    if node.stage.measures:  # two measurements are two results, even of the same thing
        parts["measured_at"] = datetime.now(UTC).isoformat()
    return fingerprint(parts), parts


def _wrong_shape(settings: Settings, wanted: ModelShape, found: ModelShape) -> Fault:
    first = wanted.differences(found)[0]
    return Fault(
        f"model.path='{settings.model.folder}' is not a {settings.model.name}: "
        f"its {first} is {getattr(found, first)}, model={settings.model.name} says {getattr(wanted, first)}.",
        todo="Leave out model=... to use the folder as it is.",
    )


def _resolve(nodes: list[Node], store: Store) -> tuple[PlannedStep, ...]:
    steps: dict[str, PlannedStep] = {}
    for node in nodes:
        steps[node.id] = _step(node, steps, store)
    return tuple(steps.values())


def _step(node: Node, before: Mapping[str, PlannedStep], store: Store) -> PlannedStep:
    digests: dict[str, str] = {}
    waits, damage = [], ""
    for name, given in node.inputs.items():
        if isinstance(given, InputSource):
            digests[name] = given.digest
        elif artifact := before[given].artifact:
            digests[name] = artifact.digest
        else:
            waits.append(f"{name} is made by {given} first")
    if not waits and not node.stage.measures:
        key, parts = node_key(node, digests)
        try:
            if artifact := store.find(node.stage.name, key):
                return PlannedStep(node, "cached", key, artifact, "nothing changed", None)
        except DamagedError as error:
            damage = f"{relative_to_cwd(error.folder)} is {error.state}"
    past = [m for m in store.history(node.stage.name) if m["label"] == node.label]
    if node.stage.measures:
        return PlannedStep(node, "run", None, None, "it measures, so it runs every time", _last_seconds(past))
    if waits:
        return PlannedStep(node, "waits", None, None, "; ".join(waits), _last_seconds(past))
    return PlannedStep(node, "run", key, None, damage or explain(parts, past), _last_seconds(past))


def _last_seconds(past: list[dict[str, Any]]) -> float | None:
    return next((float(m["seconds"]) for m in past if m["seconds"] is not None), None)


def explain(parts: Mapping[str, Any], past: list[dict[str, Any]]) -> str:
    """Explain why there is no artifact for `parts`: the difference from the most similar earlier one."""
    if not past:
        return "never made before"
    now = _flat(parts)
    differences = [_difference(now, _flat(manifest["made_from"])) for manifest in past]
    nearest = min(differences, key=len)
    return ", ".join(nearest[:3]) + (f" and {len(nearest) - 3} more" if len(nearest) > 3 else "")


def _difference(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    found = []
    for name in sorted(now.keys() | then.keys()):
        old, new = then.get(name), now.get(name)
        if old != new:
            if name.startswith("inputs."):
                found.append(f"input {name.removeprefix('inputs.')} changed")
            else:
                what = name.removeprefix("settings.").replace("libraries.", "library ")
                found.append(
                    f"{what} {old if old is not None else '(unset)'} -> {new if new is not None else '(unset)'}"
                )
    return found


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, item in value.items():
            found |= _flat(item, f"{prefix}{key}.")
        return found
    return {prefix[:-1]: value if isinstance(value, str) else canonical(value)}
