"""From the Hub to an engine, with the real client and the real stages against a hub on loopback."""

import json

import pytest

from pipelines.settings.model import BUNDLED
from tests.support.hub_server import HubServer

WORDS = ("build", "model=hub", "model.hub_id=tiny/llama", "quant=int8_wo")


@pytest.fixture(scope="module")
def hub():
    with HubServer(tokens=("hf_good",)) as server:
        server.add("tiny/llama", BUNDLED / "models" / "tiny_llama")
        server.add("tiny/gated", BUNDLED / "models" / "tiny_llama", gated=True)
        yield server


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
