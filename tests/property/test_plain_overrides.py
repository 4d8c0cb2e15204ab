"""Plain overrides are composed exactly as Hydra composes them, and everything else is left to Hydra."""

import os
import shutil

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipelines.domain.errors import UserError
from pipelines.settings import groups as groups_of_conf
from pipelines.settings import plain, project
from pipelines.settings.by_hydra import compose_config, parse_override, to_raw
from pipelines.settings.groups import CONF, choices, groups
from pipelines.settings.plain import compose_plain, override
from pipelines.settings.project import NotPlainError, load_yaml

FILES = sorted(CONF.rglob("*.yaml"))
CHOICES = [f"{group}={choice}" for group in groups() for choice in choices(group)]
LEFT_TO_HYDRA = {"eval=lm_eval", "lora=adapters"}
"""Choices that need a value."""


def leaves(node, prefix=""):
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")


KEYS = [
    *leaves(compose_plain([])), *leaves(compose_plain(["workload=chat", "speculative=medusa"])), "hydra.run.dir", "x",
    "build.no_such", "model.shape.hidden_size", "speculative.draft", "model@speculative.draft", "quant/fp8", "lora.1",
    "hydra/launcher",
]  # fmt: skip
SCALARS = [
    "0", "1", "-1", "64", "007", "+5", "1_000", "99999999999999999999999", "0x1F", "1.5", "-0.0", "1.", ".5", "1e5",
    "1E-3", "1.5e+3", "00.5", "1.2.3", "nan", "NaN", "inf", "-inf", "true", "True", "FALSE", "null", "NULL", "none",
    "fp8", "a-b", "-x", "host:8001", "/a/b.c", "a.b/c", "~/x", "org/name", "a@b", "a*", "100%", "???", "'a b'", '"1"',
    "'null'", "\\,", "a b", " a", "a ", "", "${quant.qformat}", "x${build.tp_size}", "${oc.env:HOME}", "int(3)",
    "${paths.store}/y", "glob(*)", "é", "yes", "on", "2020-01-01", "12:30", "a:", ":a", "a=b", "#a", "a#b", "None",
    "infinity", "nano", "'a,b'", '"[a: b"',
]  # fmt: skip
PLAIN_SCALARS = [
    "0", "-1", "64", "1.5", "1e-3", "true", "false", "null", "fp8", "a-b", "host:8001", "/a/b.c", "nano", "'~/a b'",
    '"1"', "''", '"null"',
]  # fmt: skip
SCALAR = st.sampled_from(SCALARS) | st.text("aefinulNT01.:-+_/e", min_size=1, max_size=5)
VALUE = st.one_of(
    SCALAR,
    st.lists(SCALAR, max_size=3).map(lambda items: f"[{','.join(items)}]"),
    st.lists(SCALAR, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    st.lists(SCALAR, min_size=2, max_size=3).map(",".join),
    st.builds("{{{}:{}}}".format, SCALAR, SCALAR),
    st.builds("[[{}],{}]".format, SCALAR, SCALAR),
    st.builds("[{{{}: }}]".format, SCALAR),
)
KEY_VALUE = st.builds("{}={}".format, st.sampled_from(KEYS), VALUE)
PLAIN_CHOICES = st.sampled_from([each for each in CHOICES if each not in LEFT_TO_HYDRA])
LISTS = st.recursive(
    st.sampled_from(PLAIN_SCALARS),
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
    max_leaves=4,
)
MAPPINGS = st.dictionaries(st.sampled_from(["a", "mean", "1", "-7", "b_2"]), LISTS, max_size=3).map(
    lambda items: "{" + ", ".join(f"{key}: {value}" for key, value in items.items()) + "}"
)
TAKEN = st.builds(
    "{}={}".format,
    st.sampled_from([key for key in leaves(compose_plain([])) if "." in key and key != "nightly.name"]),
    st.one_of(
        st.sampled_from(PLAIN_SCALARS),
        st.integers(-(10**17), 10**17).map(str),  # longer ones are left to Hydra
        st.floats(allow_nan=False, allow_infinity=False).map(str),
        st.lists(st.sampled_from(PLAIN_SCALARS), max_size=3).map(lambda items: f"[{','.join(items)}]"),
        LISTS,
        MAPPINGS,
    ),
)
OTHER = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["+", "++", "~"]), st.sampled_from([*KEYS, *groups()]), VALUE),
    st.builds("~{}".format, st.sampled_from([*KEYS, *groups()])),
    st.builds("{}={}".format, st.sampled_from(groups()), VALUE),
    st.sampled_from(CHOICES),
    st.text(max_size=6),
)


def by_hydra(overrides):
    try:
        return to_raw(compose_config(overrides))
    except UserError:
        return None


def same(mine, hydras):
    """Equal in values, types and order; repr tells 1 from 1.0 and True, and -0.0 from 0.0."""
    return repr(mine) == repr(hydras)


@pytest.fixture(scope="module")
def quick_hydra():
    """Hydra reads YAML with the parser that is compared with OmegaConf's below, which halves its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omegaconf._utils.get_yaml_loader", lambda: project._Loader)
        yield


EXAMPLES = int(os.environ.get("PLAIN_EXAMPLES", "40"))
"""Each takes a tenth of a second of processor time or more, nearly all of it Hydra's."""
COMPARED = settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.thorough
@pytest.mark.usefixtures("quick_hydra")
@COMPARED
@given(st.lists(PLAIN_CHOICES | TAKEN, max_size=8, unique_by=lambda text: text.split("=")[0]))
@example([])
@example(["experiment=cpu_demo", "quant=none", "model=llama_3_8b"])
@example(["nightly.name=x", "paths.runs=/y"])
@example(["workload.isl={distribution: normal, mean: 128, stdev: 32, min: 16}", "workload.osl={min:1,max:2.5}"])
@example(["lora=adapters", "lora.adapters={1:/adapters/sql,-7:/b}"])
@example(["speculative=draft_target", "model@speculative.draft=llama_3_2_1b", "model=llama_3_1_8b"])
@example(["multimodal=llava", "multimodal.images_per_request=3", "speculative=redrafter", "build.max_batch_size=16"])
@example(["triton.gpu_device_ids=[[0,1],[2, 3]]"])
@example(["speculative=redrafter", "speculative.num_beams=[]"])
@example(["speculative=redrafter", "speculative.num_beams=null"])
@example(["speculative=redrafter", "speculative.num_beams={a: 1}"])
@example(["speculative=lookahead", "triton.lookahead_ngram_size=fp8"])
@example(["speculative=draft_target", "build.max_draft_len={}"])
def test_plain_overrides_are_composed_as_hydra_does(overrides):
    assert same(compose_plain(overrides), by_hydra(overrides))  # or refused by both


@pytest.mark.usefixtures("quick_hydra")
@COMPARED
@given(st.lists(PLAIN_CHOICES, max_size=2), st.lists(KEY_VALUE | OTHER, min_size=1, max_size=3))
@example(["quant=fp8"], ["quant=none"])
@example([], ["build.tp_size=2", "build.tp_size=4"])
@example([], ["experiment=null"])
@example([], ["nightly.history=${nightly.name}"])
@example([], ["nightly.name=0"])
@example([], ["nightly.name=null"])
@example([], [f"sizing.peak_rate={'1' * 5000}"])
def test_what_is_taken_of_anything_else_is_what_hydra_takes(first, others):
    """Quotes, nested lists, mappings, spellings of numbers, added and removed keys, expressions, plain mistakes."""
    mine = compose_plain([*first, *others])
    if mine is not None:
        assert same(mine, by_hydra([*first, *others]))


@pytest.mark.usefixtures("quick_hydra")
@pytest.mark.parametrize("number", range(max(len(choices(group)) for group in groups())))
def test_every_choice_is_composed_as_hydra_does(number):
    taken = {group: [f"{group}={name}" for name in choices(group)] for group in groups()}
    taken = {group: [word for word in words if word not in LEFT_TO_HYDRA] for group, words in taken.items()}
    overrides = [words[number % len(words)] for words in taken.values()]
    mine = compose_plain(overrides)
    assert mine is not None
    assert same(mine, by_hydra(overrides))


def test_choices_that_compute_are_left_to_hydra():
    assert {word for word in CHOICES if compose_plain([word]) is None} == LEFT_TO_HYDRA


def test_every_file_is_read_as_omegaconf_reads_it(subtests):
    for file in FILES:
        with subtests.test(str(file)):
            text = file.read_text(encoding="utf-8")
            assert same(load_yaml(text) or {}, OmegaConf.to_container(OmegaConf.create(text), resolve=False))


@settings(max_examples=1000, derandomize=True)
@given(st.text("0123456789.eE+-_:xinfaINF~ytrue'\"#", min_size=1, max_size=10))
@example("1e5")
@example("1_0.5e3")
@example("2026-11-24")
@example("12:30:45")
@example(".5e3")
@example("a: 1\n  a: 2")
def test_a_number_in_yaml_is_what_it_is_to_omegaconf(text):
    document = f"key: {text}"
    try:
        mine = load_yaml(document)
    except NotPlainError:
        return
    theirs = OmegaConf.to_container(OmegaConf.create(document), resolve=False)
    assert same(mine, theirs) or mine["key"] != mine["key"]


def test_a_key_twice_is_left_to_hydra():
    with pytest.raises(NotPlainError):
        load_yaml("a: 1\na: 2")


def test_the_c_parser_is_used():
    assert issubclass(project._Loader, yaml.CSafeLoader)


@pytest.mark.parametrize(
    ("text", "is_plain"),
    [
        ("defaults: [auto, _self_]\nname: x", True),
        ("defaults: [auto, _self_, _self_]", False),
        ("defaults: {auto: x}", False),
        ("defaults: [{override model: tiny_llama}]", False),  # relative to engine/
        ("defaults: [{override /no_such: x}]", False),
        ("defaults: [{/model@x: tiny_llama}, _self_]", False),
        ("defaults: [optional auto]", False),
        ("- a list", False),
        ("a: 1\na: 2", False),
        ("# @package model\nname: x", False),
        ("name: ${oc.env:HOME}", False),
        ("name: ???", False),
    ],
)
def test_a_file_of_another_form_is_left_to_hydra(text, is_plain, tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "engine" / "other.yaml").write_text(text + "\n")
    monkeypatch.setattr(groups_of_conf, "CONF", tmp_path / "conf")
    monkeypatch.setattr(plain, "CONF", tmp_path / "conf")
    assert (compose_plain(["engine=other"]) is not None) == is_plain


def test_an_alias_is_a_value_of_its_own(tmp_path, monkeypatch):
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "engine" / "other.yaml").write_text("name: x\nc: &a {b: 1}\nd: *a\n")
    monkeypatch.setattr(groups_of_conf, "CONF", tmp_path / "conf")
    monkeypatch.setattr(plain, "CONF", tmp_path / "conf")
    engine = compose_plain(["engine=other", "engine.c.b=2"])["engine"]
    assert (engine["c"], engine["d"]) == ({"b": 2}, {"b": 1})


@settings(max_examples=60)
@given(
    st.text(
        st.sampled_from("ab/.-_12 ü(){}[],:='\"\\$#%@~?*") | st.characters(exclude_categories=["C", "Z"]), min_size=1
    )
)
@example("null")
@example("1.5")
@example("C:\\dir\\")
@example("my model (v1)")
def test_a_text_of_any_characters_is_one_word(text):
    assert parse_override(override("stage.link", text)).value() == text
