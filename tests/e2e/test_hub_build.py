"""From the Hub to an engine, with the real client and the real stages against a hub on loopback."""

import json
import shutil

import pytest

from pipelines.settings.model import BUNDLED
from tests.support.hub_server import HubServer
from tests.support.packed_folder import write_gptq

WORDS = ("build", "model=hub", "model.hub_id=tiny/llama", "quant=int8_wo")


LLAMA = BUNDLED / "models" / "tiny_llama"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with HubServer(tokens=("hf_good",)) as server:
        server.add("tiny/llama", LLAMA)
        server.add("tiny/gated", LLAMA, gated=True)
        server.add("tiny/llava", BUNDLED / "models" / "tiny_llava")
        server.add("tiny/gptq", write_gptq(LLAMA, tmp_path_factory.mktemp("gptq") / "gptq", group=32))
        odd = shutil.copytree(LLAMA, tmp_path_factory.mktemp("odd") / "odd")
        config = json.loads((odd / "config.json").read_text()) | {"architectures": ["OddForCausalLM"]}
        (odd / "config.json").write_text(json.dumps(config))
        server.add("tiny/odd", odd)
        yield server


def weights_sent(hub):
    return [path for path in hub.requests if "safetensors" in str(path)]


def test_a_plan_reads_config_json_of_the_hub_and_fetches_no_weights(online, hub):
    hub.forget()
    text = " ".join(online.run("plan", "plan.target=build", *WORDS[1:]).split())
    assert "4.1 M parameters" in text
    assert "download: 7.8 MiB (weights, as the Hub lists them)" in text
    assert "CPU engine at full load" in text
    assert weights_sent(hub) == []


@pytest.mark.parametrize(
    ("repo", "quant", "message"),
    [
        ("tiny/gptq", "fp8", "model.hub_id=tiny/gptq is already quantized (quant_method='gptq'), and quant=fp8 would"),
        ("tiny/odd", "fp8", "config.json of tiny/odd names the architecture 'OddForCausalLM', which this project"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_its_download(repo, quant, message, online, hub):
    hub.forget()
    text = online.run("build", "model=hub", f"model.hub_id={repo}", f"quant={quant}", code=2)
    assert message in " ".join(text.split())
    assert weights_sent(hub) == []


def test_a_model_of_the_hub_is_sized_without_its_download(online, hub):
    words = ("size", "hardware=h100_sxm", "sizing.average_rate=10", "model=hub")
    hub.forget()
    assert "model tiny--llama on H100-SXM-80GB" in " ".join(online.run(*words, "model.hub_id=tiny/llama").split())
    assert weights_sent(hub) == []
    text = " ".join(online.run(*words, "model.hub_id=tiny/none", code=2).split())
    assert "There is no model 'tiny/none' at" in text
    assert "So the sizes of tiny--none are not known. Or name a model that is known here" in text


def test_a_plan_says_what_it_cannot_know(online):
    text = " ".join(online.run("plan", "model=hub", "model.hub_id=tiny/gated").split())
    assert "not checked before its download: family, sizes and memory of tiny/gated: The model tiny/gated is" in text


def test_the_language_model_of_a_model_of_the_hub_is_taken_out(online):
    words = ("build", "model=hub", "model.hub_id=tiny/llava", "quant=int8_wo")
    text = " ".join(online.run(*words).split())
    assert "model: the language model of a LlavaForConditionalGeneration alone" in text
    assert "language_model: made" in text
    assert "Nothing to do" in online.run(*words)


def test_a_quantized_model_of_the_hub_is_taken_over(online):
    words = ("build", "model=hub", "model.hub_id=tiny/gptq", "quant=int4_gptq", "quant.group_size=32")
    text = online.run(*words)
    assert "calibration text: none, because the model is already quantized" in text


@pytest.fixture
def online(cli, hub):
    cli.environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cli.folder / "hf")}
    return cli


def test_a_hub_model_is_built_and_its_commit_recorded(online, hub):
    text = online.run(*WORDS)
    assert "commit" in text
    (manifest,) = (online.store / "download").glob("tiny--llama-*/manifest.json")
    made = json.loads(manifest.read_text())
    assert made["facts"]["commit"] == hub.repos["model", "tiny/llama"].commit
    assert set(made["files"]) >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert weights_sent(hub)


def test_a_second_build_asks_the_hub_for_nothing(online, hub):
    hub.forget()
    assert "Nothing to do" in online.run(*WORDS)
    assert hub.requests == []


def test_a_gated_model_says_what_to_do(online):
    text = " ".join(online.run("build", "model=hub", "model.hub_id=tiny/gated", code=2).split())
    assert "tiny/gated" in text
    assert "HF_TOKEN" in text
    assert "Traceback" not in text
    assert not list((online.store / ".drafts").iterdir())


@pytest.mark.thorough
def test_a_calibration_set_of_the_hub_is_used(online, hub, tmp_path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    (tmp_path / "data").mkdir()
    table = arrow.table({"article": [f"The capital of Raltus is town number {i}." for i in range(9)]})
    parquet.write_table(table, tmp_path / "data" / "train-00000-of-00001.parquet")
    hub.add("tiny/texts", tmp_path, repo_type="dataset")
    words = ("calibration=hub", "calibration.dataset=tiny/texts", "calibration.column=article", "calibration.size=4")
    online.run("build", "quant=fp8", *words)
    (manifest,) = (online.store / "quantize").glob("tiny_gemma-fp8-*/manifest.json")
    assert json.loads(manifest.read_text())["facts"]["calibration"]["sequences"] == 4
