"""A bundled model that sees, by its name alone: quantized, asked about pictures, served, measured and reported."""

import json
import re

import pytest

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(2000)]


def test_from_the_models_name_to_a_report_with_pictures(cli):
    light = ("benchmark.concurrency=[1,4]", "benchmark.on_busy=mark")
    said = cli.run("all", "model=tiny_llava", "quant=int4_awq", *light, timeout=1500)
    assert "vision encoder: 16 bit" in cli.run("plan", "model=tiny_llava", "quant=int4_awq")
    (result,) = (cli.store / "evaluate").glob("tiny_llava-int4_awq-*/evaluation.json")
    (baseline,) = (cli.store / "evaluate").glob("tiny_llava-none-*/evaluation.json")
    before, after = (json.loads(file.read_text())["overall"]["accuracy"] for file in (baseline, result))
    assert before > 0.85
    assert before - 0.2 < after
    assert re.search(r"picture: [^?]+\?\s+16 bit \w+, int4_awq \w+", said)
    page = next(cli.folder.rglob("tiny_llava/report.html")).read_text()
    assert page.count("data:image/png;base64,") == 6
    assert "16 bit: " in page
    assert "int4_awq: " in page


def test_text_is_still_answered(cli):
    said = cli.run("evaluate", "model=tiny_llava", "quant=none", "eval=mini_mmlu", "eval.limit=20", timeout=900)
    assert re.search(r"(8[5-9]|9\d)\.\d+ % of 240|none .* (8[5-9]|9\d)\.", said)
