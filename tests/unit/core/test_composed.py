"""A remembered configuration is what Hydra would say, and is forgotten when a file changes."""

import shutil

import pytest

from pipelines.settings import compose, composed
from pipelines.settings.composed import raw_config, remember


@pytest.fixture(autouse=True)
def own_conf(tmp_path, monkeypatch):
    conf = shutil.copytree(compose.CONF, tmp_path / "conf")
    monkeypatch.setattr(compose, "CONF", conf)
    monkeypatch.setattr(composed, "CONF", conf)
    monkeypatch.setattr(composed, "FOLDER", tmp_path / ".composed")
    return conf


def hydra_is_not_asked(monkeypatch):
    def asked(_overrides):
        raise AssertionError("Hydra was asked")

    monkeypatch.setattr(composed, "compose_config", asked)


def test_the_second_time_hydra_is_not_asked(monkeypatch):
    raw = raw_config(["quant=int8_sq"])
    remember(["quant=int8_sq"], raw)
    hydra_is_not_asked(monkeypatch)
    assert raw_config(["quant=int8_sq"]) == raw
    with pytest.raises(AssertionError, match="Hydra was asked"):
        raw_config(["quant=fp8"])


@pytest.mark.parametrize("change", ["edit", "add"])
def test_a_changed_file_is_seen(own_conf, change):
    remember([], raw_config([]))
    if change == "edit":
        path = own_conf / "build" / "default.yaml"
        path.write_text(path.read_text().replace("max_batch_size: 2048", "max_batch_size: 7"))
        assert raw_config([])["build"]["max_batch_size"] == 7
    else:
        (own_conf / "quant" / "mine.yaml").write_text("defaults: [none]\n")
        assert composed._place([]).is_file() is False


@pytest.mark.parametrize("text", ["calibration.column=${oc.env:COLUMN}", "hydra.run.dir=/x"])
def test_what_comes_from_elsewhere_is_not_remembered(text):
    remember([text], {})
    assert not composed.FOLDER.exists()


def test_half_a_file_is_no_answer():
    raw = raw_config([])
    remember([], raw)
    composed._place([]).write_text("{")
    assert raw_config([]) == raw
