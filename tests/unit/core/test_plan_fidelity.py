"""When predictions are compared with the 16-bit model's, what is read for it, and what is refused."""

import json
import re
from dataclasses import replace

import pytest

from pipelines.domain.errors import UserError
from pipelines.domain.model_shape import ModelShape
from pipelines.engines.registry import OPENVINO
from pipelines.host.files import sha256_file
from pipelines.plan.checks import Checked, _host_memory
from pipelines.plan.deployment import Deployment
from pipelines.plan.memory_checks import two_models
from pipelines.plan.plan import make_plan
from pipelines.report.data import ArtifactInput, place_of
from pipelines.settings.compose import load
from pipelines.settings.model import BUNDLED
from pipelines.store.store import Store, content_digest
from tests.unit.core.test_machine import MACHINE
from tests.unit.core.test_plan import LLAMA, model_folder

ORDER = ("bundled", "prose", "dialogue", "code", "languages")


@pytest.fixture
def model(tmp_path):
    return model_folder(tmp_path / "my_llama")


def plan(tmp_path, model, *overrides, target="fidelity"):
    words = [f"model.path={model}", "eval=mini_mmlu", *overrides]
    return make_plan(load(words), target, Store(tmp_path / "store"), MACHINE)


def ids(made):
    return [step.node.id for step in made.steps]


def compared(made):
    return next(step.node for step in made.steps if step.node.id == "fidelity")


def test_both_engines_are_built_and_no_questions_are_asked(tmp_path, model):
    made = plan(tmp_path, model)
    assert ids(made) == ["baseline.quantize", "baseline.build", "quantize", "build", "fidelity"]
    node = compared(made)
    assert (node.inputs["reference"], node.inputs["engine"]) == ("baseline.build", "build")
    assert node.stage.tokens == 32_768
    assert "calibration" not in node.inputs  # it is the bundled text


def test_as_a_part_of_all_it_reads_less(tmp_path, model):
    made = plan(tmp_path, model, "quant=int8_wo", target="all")
    assert ids(made)[-4:] == ["evaluate", "fidelity", "repository", "benchmark"]
    assert compared(made).stage.tokens == 4_096
    assert compared(plan(tmp_path, model, "fidelity.tokens=9000", target="all")).stage.tokens == 9_000


@pytest.mark.parametrize("word", ["quant=none", "eval.baseline=skip"])
def test_without_a_baseline_all_compares_nothing(tmp_path, model, word):
    assert "fidelity" not in ids(plan(tmp_path, model, word, target="all"))


def test_every_text_that_is_named_is_read(tmp_path, model):
    mine, calibration = tmp_path / "mine.txt", tmp_path / "calibration.jsonl"
    mine.write_text("A text.\n")
    calibration.write_text('{"text": "a"}\n' * 80)
    words = [f"fidelity.path={mine}", "calibration=local", f"calibration.path={calibration}"]
    inputs = compared(plan(tmp_path, model, *words)).inputs
    real = {f"text.{name}" for name in ("prose", "dialogue", "code", "languages")}
    assert {*real, "text.user", "calibration"} <= inputs.keys()
    assert inputs["text.user"].path == mine
    only = compared(plan(tmp_path, model, *words, "fidelity.texts=[calibration]")).inputs
    assert not real & only.keys()
    with pytest.raises(UserError, match=r"fidelity has no text: give fidelity\.texts=\[prose,code\]"):
        plan(tmp_path, model, "fidelity.texts=[]")
    with pytest.raises(UserError, match=r"fidelity\.path='.*absent\.txt'"):
        plan(tmp_path, model, f"fidelity.path={tmp_path / 'absent.txt'}")


def test_another_model_can_be_the_reference(tmp_path, model):
    """Then it is built in 16 bit beside the model, which may itself be in 16 bit."""
    original = model_folder(tmp_path / "original")
    made = plan(tmp_path, model, "quant=none", f"fidelity.reference_path={original}")
    assert ids(made) == ["reference.quantize", "reference.build", "quantize", "build", "fidelity"]
    assert (made.steps[0].node.label, made.steps[2].node.label) == ("original-none", "my_llama-none")
    node = compared(made)
    assert node.inputs["reference_model"].path == original
    assert (node.stage.model, node.stage.reference) == ("my_llama", "original")
    with pytest.raises(UserError, match=r"fidelity\.reference_path='.*absent'"):
        plan(tmp_path, model, f"fidelity.reference_path={tmp_path / 'absent'}")


def test_what_cannot_be_compared_is_refused(tmp_path, model):
    with pytest.raises(
        UserError, match="quant=none is the 16-bit model itself, so there is nothing to compare it with"
    ):
        plan(tmp_path, model, "quant=none")
    words = ("engine=tensorrt_llm", "hardware=h100_sxm")
    with pytest.raises(
        UserError, match=r"fidelity of engine=tensorrt_llm cannot be measured: .* Engines that do: openvino"
    ):
        plan(tmp_path, model, *words)
    assert "fidelity" not in ids(plan(tmp_path, model, *words, target="all"))


def test_of_a_server_only_the_16_bit_model_is_built(tmp_path, model):
    """Whatever format is given: what is served has its own. The comparison runs every time."""
    for words in (["quant=int8_wo"], ["quant=none"]):
        made = plan(tmp_path, model, "eval.url=http://127.0.0.1:9/v1", *words)
        assert ids(made) == ["quantize", "build", "fidelity"]
        assert {step.node.label for step in made.steps} == {"my_llama-none", "my_llama-served"}
        assert compared(made).inputs["engine"] == "build"
        assert (compared(made).stage.tokens, compared(made).stage.measures) == (32_768, True)
        assert any(note.startswith("http://127.0.0.1:9/v1 is compared: its format is its own") for note in made.notes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fidelity.by_layer=true"], r"fidelity\.by_layer=true with eval\.url='http://h/v1': a server does not give"),
        (["fidelity.reference_path={other}"], r"fidelity\.reference_path='.*other' with eval\.url='http://h/v1'"),
        (["eval.url=grpc://h:1"], r"eval\.url='grpc://h:1' is a Triton server's"),
        (["engine=tensorrt_llm", "hardware=h100_sxm"], "fidelity of engine=tensorrt_llm cannot be measured"),
        (["fidelity.top_logprobs=0"], r"fidelity\.top_logprobs"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused(tmp_path, model, words, said):
    other = model_folder(tmp_path / "other")
    with pytest.raises(UserError, match=said):
        plan(tmp_path, model, "eval.url=http://h/v1", *(word.format(other=other) for word in words))


def test_two_models_must_fit_into_memory(tmp_path, model):
    """Without room for them `fidelity` is refused, and `all` does the rest and says so."""
    large = LLAMA | {"hidden_size": 4096, "num_hidden_layers": 24, "intermediate_size": 11008}
    small = replace(MACHINE, memory_bytes=16 * 2**30)
    shape = ModelShape.from_hf_config(large, "config.json")
    settings = load([f"model.path={model}"])
    deployment = Deployment(settings, "fidelity", OPENVINO, small, shape=shape)
    why = two_models(deployment)
    assert "fidelity loads the 16-bit my_llama and a second model, which takes about" in why
    assert two_models(replace(deployment, machine=replace(MACHINE, memory_bytes=400 * 2**30))) == ""
    tight = replace(MACHINE, memory_bytes=int(0.3 * 2**30))
    alone, among_others = Checked(), Checked()
    _host_memory(replace(deployment, machine=tight), alone)
    what = "fidelity loads the 16-bit my_llama and a second model"
    assert alone.faults[0].message.startswith(what)
    assert "this machine has 307.2 MiB" in alone.faults[0].message
    _host_memory(replace(deployment, machine=tight, target="all"), among_others)
    assert not any(what in fault.message for fault in among_others.faults)
    assert any(note.startswith(f"left out: {what}") for note in among_others.notes)


def test_a_format_that_takes_less_needs_less_memory_unless_layers_are_compared(tmp_path, model):
    """The 16-bit model is loaded beside the compressed one, and twice for the noise of its layers."""
    large = LLAMA | {"hidden_size": 4096, "num_hidden_layers": 24, "intermediate_size": 11008}
    shape = ModelShape.from_hf_config(large, "config.json")

    def needed(*words):
        settings = load([f"model.path={model}", *words])
        why = two_models(Deployment(settings, "fidelity", OPENVINO, replace(MACHINE, memory_bytes=2**30), shape=shape))
        return float(re.search(r"takes about ([\d.]+) GiB", why)[1])

    whole, packed = needed("quant=none"), needed("quant=int4_awq")
    assert packed < 0.75 * whole
    assert needed("quant=int4_awq", "fidelity.by_layer=true") == whole


@pytest.mark.parametrize("asked", ["32", "128"])
def test_a_number_of_rounded_activations_does_not_refuse_the_baseline(tmp_path, model, asked):
    """The 16-bit baseline has no packed weights to round them for: it is the one of every other format."""
    words = ["quant=int4_awq", f"engine.openvino.dynamic_quantization={asked}"]
    for value in (asked, "off"):
        settings = load([f"model.path={model}", f"engine.openvino.dynamic_quantization={value}"])
        assert settings.baseline().engine == load([f"model.path={model}", "quant=none"]).engine
    plan(tmp_path, model, *words)
    with pytest.raises(UserError, match=rf"dynamic_quantization={asked} has no effect on quant=fp8"):
        plan(tmp_path, model, "quant=fp8", words[1])


@pytest.mark.parametrize("amx", [True, False])
def test_a_number_without_effect_on_this_processor_is_said(tmp_path, model, amx, monkeypatch):
    for name, value in {"has_vnni": True, "has_amx": amx, "native_bf16": True}.items():
        monkeypatch.setattr(f"pipelines.engines.openvino.memory.{name}", lambda value=value: value)
    notes = " ".join(plan(tmp_path, model, "quant=int4_awq", "engine.openvino.dynamic_quantization=128").notes)
    assert ("dynamic_quantization=128 has no effect on this processor: it has AMX" in notes) is amx


def test_more_tokens_and_layers_are_another_result_and_labels_are_part_of_it(tmp_path, model):
    keys = {
        word: compared(plan(tmp_path, model, *filter(None, [word]))).stage.identity()
        for word in ("", "fidelity.tokens=64", "fidelity.by_layer=true", "fidelity.window=64", "calibration.size=64")
    }
    assert len({json.dumps(each, sort_keys=True) for each in keys.values()}) == len(keys)


@pytest.mark.parametrize(
    ("words", "calibration", "texts"),
    [
        ((), "texts/calibration.jsonl", {"prose", "dialogue", "code", "languages"}),
        (("calibration=bundled",), "corpus.jsonl", {"prose", "dialogue", "code", "languages"}),
        (("model.path=null", "model=tiny_llama"), "corpus.jsonl", {"bundled"}),
        ((f"model.path={BUNDLED / 'models' / 'tiny_qwen'}",), "corpus.jsonl", {"bundled"}),
        (("model.path=null", "model=tiny_llama", "calibration=real_text", "fidelity.texts=[code]"),
         "texts/calibration.jsonl", {"code"}),
    ],
)  # fmt: skip
def test_models_that_are_not_bundled_get_real_text(words, calibration, texts, tmp_path, model):
    made = plan(tmp_path, model, "quant=int8_sq", *words)
    quantize = next(step.node for step in made.steps if step.node.id == "quantize")
    assert quantize.inputs["calibration"].path == BUNDLED / calibration
    read = compared(made).inputs
    assert {name for name in read if name.startswith("text.")} == {f"text.{name}" for name in texts}
    assert "calibration" not in read
    named = "real_text" if calibration.startswith("texts") else "bundled"
    assert any(note.startswith(f"calibration text: {named} (") for note in made.notes)
    assert any(note == f"fidelity text: {', '.join(sorted(texts, key=ORDER.index))}" for note in made.notes)


def test_shipped_texts_are_disjoint_and_say_where_they_are_from():
    """No paragraph of 200 characters is both calibrated on and judged on."""
    rows = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in
            (BUNDLED / "texts").rglob("*.jsonl")}  # fmt: skip
    assert all(row["source"] and row["licence"] for each in rows.values() for row in each)
    parts = {
        path: {part for row in each for part in paragraphs(row) if len(part) >= 200} for path, each in rows.items()
    }
    calibration = parts.pop(BUNDLED / "texts" / "calibration.jsonl")
    assert len(calibration) > 300
    assert {path.stem for path in parts} == {"prose", "dialogue", "code", "languages"}
    assert not [part for each in parts.values() for part in each & calibration]
    assert {row["licence"] for path, each in rows.items() if path.stem != "prose" for row in each}.isdisjoint(
        {row["licence"] for row in rows[BUNDLED / "texts" / "fidelity" / "prose.jsonl"]}
    )


def paragraphs(row: dict) -> list[str]:
    text = row.get("text") or "\n\n".join(message["content"] for message in row["messages"])
    return text.split("\n\n")


def test_a_report_names_shipped_text_by_its_content():
    """A user's file of the same name is not taken for it."""
    path = BUNDLED / "texts" / "calibration.jsonl"
    digest = content_digest({"": sha256_file(path)})
    ours, other = (ArtifactInput("calibration", each, path.name, in_store=False) for each in (digest, "0" * 64))
    assert place_of(ours) == "real_text (dialogue, code and prose of free licences)"
    assert place_of(other) == "calibration.jsonl"
