"""Judge every model in every format on every engine by the rules of `make plan`."""

from __future__ import annotations

import json
from typing import Any

from pipelines.doctor.record import CombinationVerdict
from pipelines.document.show import count
from pipelines.domain.errors import UserError
from pipelines.domain.formats import QFormat
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.description import EngineDescription
from pipelines.engines.registry import ENGINES
from pipelines.host.machine import Machine
from pipelines.plan import checks
from pipelines.plan.user_inputs import Found
from pipelines.settings.compression import QuantSettings
from pipelines.settings.groups import CONF, choices
from pipelines.settings.model import ModelSettings
from pipelines.settings.root import Settings


def look(settings: Settings, machine: Machine) -> list[CombinationVerdict]:
    """Judge all combinations, with the rest of the configuration as it is."""
    models = [(model, _shape(model)) for model in _models()]
    quants = sorted(_quants(), key=lambda quant: list(QFormat).index(quant.qformat))
    return [
        _judge(settings, machine, engine, model, shape, quant)
        for engine in ENGINES.values()
        for model, shape in models
        for quant in quants
    ]


def _judge(
    settings: Settings,
    machine: Machine,
    engine: EngineDescription,
    model: ModelSettings,
    shape: ModelShape | None,
    quant: QuantSettings,
) -> CombinationVerdict:
    asked = settings.model_copy(
        update={"model": model, "quant": quant, "engine": settings.engine.model_copy(update={"name": engine.setting})}
    )
    name = quant.qformat.value
    if reason := _missing(engine, machine, settings.build.tp_size * settings.build.pp_size):
        return CombinationVerdict(engine.setting, model.name, name, works=False, reason=reason[0], todo=reason[1])
    try:
        faults = checks.check(asked, shape, engine, machine, "build", Found()).faults
    except UserError as error:
        faults = list(error.faults)
    if not faults:
        return CombinationVerdict(engine.setting, model.name, name, works=True)
    first = faults[0]
    todo = f"{first.allowed} {first.todo}".strip()
    return CombinationVerdict(engine.setting, model.name, name, works=False, reason=first.message, todo=todo)


def _missing(engine: EngineDescription, machine: Machine, ranks: int) -> tuple[str, str] | None:
    """Return what the machine lacks for an engine, whatever the model: (reason, what to do)."""
    lacks = engine.lacks(machine)
    if engine.needs_gpu and machine.gpus and len(machine.gpus) < ranks:
        lacks.append(f"{count(ranks, 'rank')} on {count(ranks, 'GPU')}, of which there are {len(machine.gpus)}")
    todo = "Use NVIDIA's container on a GPU machine (make shell); `make plan` and engine=openvino work here."
    return ("; ".join(lacks), todo) if lacks else None


def _models() -> list[ModelSettings]:
    return [ModelSettings.model_validate(_file("model", name)) for name in choices("model") if name != "hub"]


def _quants() -> list[QuantSettings]:
    return [QuantSettings.model_validate(_file("quant", name)) for name in choices("quant")]


def _file(group: str, name: str) -> dict[str, Any]:
    """Read one file under conf/, without the files it builds on, whose values have defaults of their own."""
    import yaml

    raw: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    raw.pop("defaults", None)
    return raw


def _shape(model: ModelSettings) -> ModelShape | None:
    if model.shape is not None:
        return model.shape.to_shape()
    if model.folder is None:
        return None
    return ModelShape.from_hf_config(json.loads((model.folder / "config.json").read_text(encoding="utf-8")))
