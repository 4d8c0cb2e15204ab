"""Turn settings into a plan: which stages run, which are cached, and why.

No torch; nothing is written except the cache of file hashes and, in the Hub's own cache, config.json of a model that is
to be downloaded. Otherwise the Hub is asked only for `eval=auto` of a model that is not bundled: whether it has the
questions.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pipelines.compress.specs import pruned_shape
from pipelines.domain.errors import Fault, UserError, collecting, refuse
from pipelines.domain.language_model import text_config, whole
from pipelines.domain.model_shape import ModelShape
from pipelines.domain.rotary import Rotary
from pipelines.engines.registry import choose
from pipelines.host.disk import no_folders, relative_to_cwd, unwritable_folders
from pipelines.host.files import json_object
from pipelines.host.machine import Machine, library_versions
from pipelines.plan import checks, other_memory
from pipelines.plan.accuracy_checks import WITHOUT_QUESTIONS
from pipelines.plan.deployment import Deployment
from pipelines.plan.engine_nodes import Node
from pipelines.plan.flow import needed_for, nodes
from pipelines.plan.targets import EVALUATED, Goal, Target
from pipelines.plan.user_inputs import UserInputs, inspect_inputs
from pipelines.predict.performance.limits import ChosenLimits
from pipelines.settings.base import flat
from pipelines.settings.root import Settings
from pipelines.stages.download import Download
from pipelines.store.manifest import DamagedError
from pipelines.store.sources import InputSource
from pipelines.store.store import Artifact, Store, canonical, fingerprint


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One node of the plan and its status.

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
        reason: why this engine was chosen.
        steps: in the order they run.
        notes: what fits where, and what was chosen.
        warnings: valid, but perhaps not what the user meant.
        not_here: what keeps it from running on this machine; it can still be described.
        missing: likewise, what this machine could have: packages, a tritonserver, and free ports.
        only: the stage that is wanted, if the plan holds no more than this stage and what it needs.
    """

    deployment: Deployment
    reason: str
    steps: tuple[PlannedStep, ...]
    notes: tuple[str, ...]
    warnings: tuple[Fault, ...] = ()
    not_here: tuple[Fault, ...] = ()
    missing: tuple[Fault, ...] = ()
    only: str | None = None

    @property
    def settings(self) -> Settings:
        """The settings as resolved."""
        return self.deployment.settings

    @property
    def command(self) -> str:
        """Command that runs this plan."""
        return self.deployment.target if self.only is None else "stage"

    @property
    def refusals(self) -> tuple[Fault, ...]:
        """Why it does not run on this machine, if it does not."""
        return self.not_here + self.missing

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return all(step.state == "cached" for step in self.steps)


def make_plan(settings: Settings, target: Target, store: Store, machine: Machine, only: str | None = None) -> Plan:
    """Check everything that can be known now, and find cached artifacts.

    With `only`, everything is left out but this stage and what it needs.

    Raises:
        UserError: every fault found, at once.
    """
    goal = Goal(settings, target)
    faults = no_folders(checks.output_folders(goal, store.root, makes=True))
    goal, questions = with_questions(goal, store)
    deployment, reason, tuning = _resolved(goal, store, machine, faults)
    checked = checks.check(deployment)
    faults.extend(checked.faults)
    refuse(faults)
    made = nodes(deployment)
    if only is not None:
        made = needed_for(made, only)
    steps = _resolve(made, store)
    todo = [step.node.stage for step in steps if step.state != "cached"]
    unwritable = unwritable_folders(checks.output_folders(goal, store.root, makes=bool(todo)))
    quantizes = any(stage.name == "quantize" for stage in todo)
    if only is not None and quantizes and (faults := other_memory.check_compressing(deployment)):
        raise UserError.of(faults)
    store.hashes.save()
    not_here = checks.check_machine(deployment, todo)
    if not not_here and deployment.on_model and deployment.is_for_a_named_gpu:
        not_here = checks.check_memory(deployment)
    shape = deployment.shape
    memory = (other_memory.Quantizing.of(deployment, shape).note,) if quantizes and shape else ()
    # a plan that cannot run here runs on a machine that has the tools
    missing = () if not_here else checks.check_installed(goal, todo, only) or checks.check_ports(goal, todo)
    if not not_here and only in (None, "benchmark"):
        made_before = next((s.artifact for s in steps if s.node.stage.name == "repository"), None)
        missing = (*checks.check_code(deployment, made_before.path if made_before else None), *missing)
    notes, warnings = (*questions, *checked.notes, *memory, *tuning), (*checked.warnings, *unwritable)
    return Plan(deployment, reason, steps, notes, warnings, (*not_here, *unwritable), missing, only)


def _resolved(
    goal: Goal, store: Store, machine: Machine, faults: list[Fault]
) -> tuple[Deployment, str, tuple[str, ...]]:
    """Return what will run, why its engine was chosen, and the plan's notes on what is tuned; faults are added."""
    settings, facts = goal.settings, UserInputs()
    shape = settings.model.shape.to_shape() if settings.model.shape else None
    with collecting(faults):
        facts = inspect_inputs(goal, store.hashes)
    with collecting(faults):
        facts = _with_hub_models(goal, store, facts)
    if facts.shape and shape and facts.shape != shape:
        model, wrong = settings.model, shape.differences(facts.shape)[0]
        faults.append(
            Fault(
                f"model.path='{model.folder}' is not a {model.name}: "
                f"its {wrong} is {getattr(facts.shape, wrong)}, model={model.name} says {getattr(shape, wrong)}.",
                todo="Leave out model=... to use the folder as it is.",
            )
        )
    shape = facts.shape or shape
    if facts.built is not None:
        settings = settings.as_built(facts.built.variant, facts.built.tp_size, facts.built.pp_size)
    if goal.compares_server:  # its format is its own
        settings = settings.baseline()
    if settings.prune.prunes and shape is not None and facts.built is None and not goal.is_elsewhere:
        with collecting(faults):  # every later stage sees the shape that is left
            shape = pruned_shape(settings.prune, shape)
    choice = choose(facts.built.flavour if facts.built else settings.engine.name, machine, settings.hardware.name)
    planned = Deployment(settings, goal.target, choice.engine, machine, facts, shape)
    tuned = planned.tuned
    if facts.built is not None:  # only the server is left to tune
        return planned.with_groups(triton=tuned.settings.triton), choice.reason, ()
    limits = None
    with collecting(faults):
        limits = _limits(tuned)
    limited = replace(tuned, limits=limits)
    return limited.limited if choice.engine.needs_gpu else limited, choice.reason, tuned.tuning_notes


def _with_hub_models(goal: Goal, store: Store, facts: UserInputs) -> UserInputs:
    """Add what is stated of models that come from the Hub, if the settings do not state their sizes.

    Raises:
        UserError: a model is not of a family that is built.
    """
    model, draft = goal.settings.model, goal.settings.speculative.draft
    read: dict[str, Any] = {"hub_folders": {}, "hub_bytes": {}, "unread": []}
    for name, source, rotary in (("shape", model, "rotary"), ("draft", draft, "draft_rotary")):
        if source is None or source.folder or source.shape or goal.is_elsewhere or (source is model and facts.built):
            continue
        folder, size, why = _on_hub(Download(str(source.hub_id), source.revision or "main", "model", None), store)
        if folder is None:
            read["unread"] += [f"{source.hub_id}: {why}"] if why else []
            continue
        read["hub_bytes"][source.hub_id] = size
        config, stated_in = json_object(folder / "config.json"), f"config.json of {source.hub_id}"
        text = text_config(config, stated_in) if source is model else config
        read[name], read[rotary] = ModelShape.from_hf_config(text, stated_in), Rotary.of(text)
        read |= {"whole": whole(config)} if source is model else {}
        read["hub_folders"][source] = folder
    return replace(facts, **read)


def _on_hub(model: Download, store: Store) -> tuple[Path | None, int, str]:
    """Return a folder that states what a model is (its download, else the Hub's cache), what to fetch, or why not."""
    with suppress(DamagedError):  # downloaded again
        if made := _found(model, store):
            return made.path, 0, ""
    return _stated(model.repo_id, model.revision)


@cache
def _stated(repo_id: str, revision: str) -> tuple[Path | None, int, str]:
    if find_spec("huggingface_hub") is None:
        return None, 0, ""  # the plan names the package as missing
    from pipelines.hub import HubSource, stated  # takes a third of a second

    try:
        return *stated(HubSource(repo_id, revision)), ""
    except UserError as error:
        return None, 0, " ".join(f"{fault.message} {fault.todo}".rstrip() for fault in error.faults)


def with_questions(goal: Goal, store: Store) -> tuple[Goal, tuple[str, ...]]:
    """Return the goal with the questions that eval=auto stands for, and a line for the plan.

    Where there are none the task remains `auto`. A bundled model's were chosen when the settings were read.
    """
    settings, questions = goal.settings, goal.settings.eval
    if goal.target not in EVALUATED or not questions.is_auto:
        return goal, ()
    real = questions.as_mmlu()
    data = Download(str(real.dataset), str(real.revision), "dataset")
    # a model from the Hub comes with the same connection
    at_hand = settings.model.folder is None or questions.dataset_path is not None or _in_store(data, store)
    if not (why := "" if at_hand else _not_on_hub(data.repo_id, data.revision)):
        compared = " and fidelity" if real.fidelity else ""
        note = f"questions: mmlu{compared}, as for every model that is not bundled, unless eval= says otherwise"
        return goal.with_groups(eval=real), (note,)
    goal = goal.with_groups(eval=questions.with_fidelity())
    verdict = ", and the verdict is NOT MEASURED" if goal.is_unasked else ""
    return goal, (f"questions: none{verdict}, because there is no mmlu here: {why} {WITHOUT_QUESTIONS}",)


def _found(source: Download, store: Store) -> Artifact | None:
    return store.find(source.name, node_key(Node("download", source, "", {}), {})[0])


def _in_store(data: Download, store: Store) -> bool:
    try:
        return _found(data, store) is not None
    except DamagedError:  # made again
        return False


@cache
def _not_on_hub(repo_id: str, revision: str) -> str:
    """Return why the Hub, or offline its cache, does not give a data set; empty if it does."""
    if find_spec("huggingface_hub") is None:
        return ""  # the plan names the package as missing
    from pipelines.hub import HubSource, why_not  # takes a third of a second

    return why_not(HubSource(repo_id, revision, "dataset"))


def _limits(d: Deployment) -> ChosenLimits | None:
    """Choose the limits of an engine on the GPU that is named or found, if its speed is known; a device has its own."""
    if d.gpu.mem_bw_gb_s is None or d.engine.on_device:
        return None
    # the performance model needs numpy, which takes a while to load
    from pipelines.predict.performance.deployment import costs
    from pipelines.predict.performance.placement import limits_for_load

    return limits_for_load(d.settings, d.shape, d.gpu, costs(d.settings))


def node_key(node: Node, digests: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Return the key of a node's artifact, and the parts it is computed from.

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


def _resolve(nodes: list[Node], store: Store) -> tuple[PlannedStep, ...]:
    steps: dict[str, PlannedStep] = {}
    for node in nodes:
        steps[node.id] = _step(node, steps, store)
    return tuple(steps.values())


def _step(node: Node, before: Mapping[str, PlannedStep], store: Store) -> PlannedStep:
    digests: dict[str, str] = {}
    waits, damage = [], ""
    past = [manifest for manifest in store.history(node.stage.name) if manifest["label"] == node.label]
    seconds = next((float(manifest["seconds"]) for manifest in past if manifest["seconds"] is not None), None)
    for name, source in node.inputs.items():
        if isinstance(source, InputSource):
            digests[name] = source.digest
        elif artifact := before[source].artifact:
            digests[name] = artifact.digest
        else:
            waits.append(f"{name} is made by {source} first")
    if not waits and not node.stage.measures:
        key, parts = node_key(node, digests)
        try:
            if artifact := store.find(node.stage.name, key):
                return PlannedStep(node, "cached", key, artifact, "nothing changed", None)
        except DamagedError as error:
            damage = f"{relative_to_cwd(error.folder)} {error.damage}"
    if node.stage.measures:
        return PlannedStep(node, "run", None, None, "it measures, so it runs every time", seconds)
    if waits:
        return PlannedStep(node, "waits", None, None, "; ".join(waits), seconds)
    return PlannedStep(node, "run", key, None, damage or explain(parts, past), seconds)


def explain(parts: Mapping[str, Any], past: list[dict[str, Any]]) -> str:
    """Explain why there is no artifact for `parts`: the difference from the most similar earlier one."""
    if not past:
        return "never made before"
    now, *before = (
        {name: each if isinstance(each, str) else canonical(each) for name, each in flat(made).items()}
        for made in (parts, *(manifest["made_from"] for manifest in past))
    )
    differences = [_difference(now, then) for then in before]
    nearest = min(differences, key=len)
    return ", ".join(nearest[:3]) + (f" and {len(nearest) - 3} more" if len(nearest) > 3 else "")


def _difference(now: Mapping[str, str], then: Mapping[str, str]) -> list[str]:
    differences = []
    for name in sorted(now.keys() | then.keys()):
        old, new = then.get(name), now.get(name)
        if old != new:
            if name.startswith("inputs."):
                differences.append(f"input {name.removeprefix('inputs.')} changed")
            else:
                what = name.removeprefix("settings.").replace("libraries.", "library ")
                differences.append(
                    f"{what} {old if old is not None else '(unset)'} -> {new if new is not None else '(unset)'}"
                )
    return differences
