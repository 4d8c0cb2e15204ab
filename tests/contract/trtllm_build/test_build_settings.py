"""Settings, conf/ and trtllm-build's own options are the same, one by one."""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from pydantic import ValidationError

from pipelines.engines.tensorrt_llm.config import DECIDED, BuildSettings
from pipelines.engines.tensorrt_llm.folder import options

OPTIONS = {option.key: option for option in options()}
FIELDS = {field.alias or name: field for name, field in BuildSettings.model_fields.items()}
TYPES = {"str": str, "KVCacheType": str, "int": int, "flag": bool, "list[str]": tuple}


def plain(annotation):
    """(type, choices) of a field, without None and bounds."""
    if get_origin(annotation) is Annotated:
        return plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (only,) = (part for part in get_args(annotation) if part is not NoneType)
        return plain(only)
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    if get_origin(annotation) is tuple:
        return tuple, plain(get_args(annotation)[0])[1]
    return (str if annotation is Path else annotation), None


def test_there_are_all_67_options_and_the_ranks():
    assert len(OPTIONS) == 67
    assert set(FIELDS) == set(OPTIONS) | {"tp_size", "pp_size"}


def test_an_option_has_the_programs_type_choices_and_default(subtests):
    for key in OPTIONS:
        with subtests.test(key):
            field, option = FIELDS[key], OPTIONS[key]
            kind, choices = plain(field.annotation)
            assert kind is TYPES[option.type]
            assert choices == option.choices
            assert field.default == option.default


@pytest.mark.parametrize("key", DECIDED)
def test_what_this_tool_decides_is_refused_with_the_reason(key):
    value = True if OPTIONS[key].type == "flag" else ["/x"] if key == "lora_dir" else "nemo"
    with pytest.raises(ValidationError, match=rf"(?s){key}.*cannot be set to .*{DECIDED[key][:20]}"):
        BuildSettings(**{key: value})


@pytest.mark.parametrize("level", ["error", "warning", "internal_error"])
def test_a_log_without_facts_is_refused(level):
    with pytest.raises(ValidationError, match=rf"log_level\n.*'{level}' leaves out sizes and seconds.*info"):
        BuildSettings(log_level=level)
