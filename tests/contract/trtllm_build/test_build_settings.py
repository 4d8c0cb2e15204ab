"""Settings and trtllm-build's own options are the same, one by one."""

from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
from pydantic import ValidationError

from pipelines.engines.tensorrt_llm.config import DECIDED, OPTIONS, TABLE_OF_OTHERS, BuildSettings

TYPES = {"str": str, "KVCacheType": str, "int": int, "flag": bool, "list[str]": tuple}
FIELDS = BuildSettings.model_fields.keys() - {"tp_size", "pp_size", "moe_ep_size", "trtllm"}
KINDS = {name: BuildSettings.model_fields[name].annotation for name in FIELDS} | TABLE_OF_OTHERS.kinds


def plain(annotation):
    """(type, choices) of an option, without None and bounds."""
    if get_origin(annotation) is Annotated:
        return plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        (only,) = (part for part in get_args(annotation) if part is not NoneType)
        return plain(only)
    if get_origin(annotation) is Literal:
        return str, get_args(annotation)
    if get_origin(annotation) is tuple:
        return tuple, plain(get_args(annotation)[0])[1]
    return annotation, None


def test_there_are_all_67_options_each_in_one_place():
    assert len(OPTIONS) == 67
    assert sorted([*FIELDS, *TABLE_OF_OTHERS.kinds, *DECIDED]) == sorted(OPTIONS)


def test_an_option_has_the_programs_type_choices_and_default(subtests):
    for key, kind in KINDS.items():
        with subtests.test(key):
            option = OPTIONS[key]
            assert plain(kind) == (TYPES[option.type], option.choices)
            assert BuildSettings()[key] == option.default


@pytest.mark.parametrize("key", DECIDED)
def test_what_cannot_be_set_is_refused_with_the_reason(key):
    value = True if OPTIONS[key].type == "flag" else ["/x"] if key == "lora_dir" else "nemo"
    with pytest.raises(ValidationError, match=rf"(?s){key}.*cannot be set to .*{DECIDED[key][:20]}"):
        BuildSettings(trtllm={key: value})


@pytest.mark.parametrize("level", ["error", "warning", "internal_error"])
def test_a_log_without_facts_is_refused(level):
    with pytest.raises(ValidationError, match=rf"log_level\n.*'{level}' leaves out sizes and seconds.*info"):
        BuildSettings(trtllm={"log_level": level})
