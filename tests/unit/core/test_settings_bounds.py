"""Every number of the settings has bounds, and names stay inside the store. The settings' own schema is walked."""

import copy
import inspect
import math
import types
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from pipelines.domain.errors import UserError
from pipelines.settings.by_hydra import compose_config, to_raw
from pipelines.settings.compose import load
from pipelines.settings.root import Settings, validate

WHOLE = ["model=gemma_2b", "speculative=draft_target", "model@speculative.draft=gemma_2b"]


def numbers(annotation, path=(), inside=()):
    """Every int and float below a type: (its keys, how lists and mappings wrap it, its type)."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from numbers(parts[0], path, inside)
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from numbers(part, path, inside)
    elif origin is tuple:
        yield from numbers(parts[0], path, (*inside, list))
    elif origin is dict:
        yield from numbers(parts[1], path, (*inside, dict))
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from numbers(field.annotation, (*path, name), inside)
    elif annotation in (int, float):
        yield path, inside, annotation


FOUND = {path: (inside, kind) for path, inside, kind in numbers(Settings) if not (inside and len(path) > 2)}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return to_raw(compose_config(WHOLE))


def given(raw, path, inside, value):
    changed = copy.deepcopy(raw)
    place = changed
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    for wrap in reversed(inside):
        value = [value] if wrap is list else {"1": value}
    place[path[-1]] = value
    return changed


def test_the_walk_finds_the_numbers():
    assert len(FOUND) > 150
    assert {("build", "max_batch_size"), ("benchmark", "concurrency"), ("sizing", "users")} <= FOUND.keys()


@pytest.mark.parametrize(
    "value",
    [10**18, math.nan, *(pytest.param(each, marks=pytest.mark.thorough) for each in (-(10**18), math.inf, -math.inf))],
    ids=str,
)
def test_no_number_is_absurd(whole, value):
    """Refused by name: what is meant as "very much" would be computed with for hours, or overflow."""
    passed = []
    for path, (inside, kind) in FOUND.items():
        key = ".".join(path)
        try:
            validate(given(whole, path, inside, kind(value) if math.isfinite(value) else value))
        except UserError as error:
            if any(fault.message.startswith(key) for fault in error.faults):
                continue
        passed.append(key)
    assert passed == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("build.max_batch_size=1000000000000", r"max_batch_size='1000000000000' is not valid: .*less than or equal to"),
        ("workload.isl=inf", r"workload\.isl\.mean='inf' is not valid: input should be a finite number"),
        ("sizing.average_rate=1e12", r"average_rate is 1e\+12, which is out of range: give at most 1,000,000,000"),
        ("engine.openvino.kv_cache_bytes=1000000000000000", r"out of range: give at most 17,592,186,044,416"),
        ("benchmark.concurrency=[1,100000000]", r"concurrency\.1='100000000' is not valid"),
        ("build.trtllm.max_lora_rank=10000000000", r"build\.trtllm\.max_lora_rank is 1e\+10, which is out of range"),
        ("model.name=../x", r"model\.name '\.\./x' names folders"),
        ("model.name=", r"model\.name '' names folders"),
        ("model.name=a/b", r"model\.name 'a/b' names folders"),
        ("model.hub_id=../../etc", r"model\.hub_id '\.\./\.\./etc' is not a name on the Hub"),
        ("model.revision=../main", r"model\.revision '\.\./main' is not a revision"),
        ("eval.margin_points=0", r"eval\.margin_points='0' is not valid: input should be greater than 0"),
        ("eval.margin_points=50.5", r"eval\.margin_points='50\.5' is not valid: .*less than or equal to 50"),
        ("eval.false_go=0.3", r"eval\.false_go='0\.3' is not valid: .*less than or equal to 0\.2"),
        ("eval.dataset=/etc/passwd", r"eval\.dataset '/etc/passwd' is not a name on the Hub"),
    ],
)
def test_what_is_out_of_range_is_named(override, message):
    with pytest.raises(UserError, match=message):
        load([override])


def test_a_folder_gives_a_name_inside_the_store():
    """`model.path=some/..` would be called '..', and its artifacts would lie beside the store."""
    model = load(["model.path=/models/llama/.."]).model
    assert model.label == "models"
    assert load(["model.path=/"]).model.label == "root"
    hub = load(["model=hub", "model.hub_id=org/name", "model.revision=refs/pr/3"]).model
    assert hub.label == "org--name"
