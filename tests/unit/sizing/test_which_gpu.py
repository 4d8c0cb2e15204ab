"""`make size hardware=[...]`: one table of GPUs, the cheapest first."""

import json
import re

import pytest

from pipelines.cli.main import main
from pipelines.predict.config import PriceSettings
from pipelines.predict.sizing.which_gpu import several_gpus

LOAD = ["model=llama_3_8b", "quant=fp8", "workload.isl=2000", "workload.osl=200", "sizing.slo.ttft_ms=500"]
FEW = ["sizing.tp=1", "sizing.requests=400"]


def size(tmp_path, capsys, *words):
    """Return the exit code, and what was printed with its lines joined."""
    code = main(["size", *words, f"report.folder={tmp_path}"])
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def answer(tmp_path):
    (file,) = tmp_path.glob("size-*-gpus-*/answer.json")
    return json.loads(file.read_text())


def test_gpus_are_ranked_by_what_good_tokens_cost(tmp_path, capsys):
    """An A100 has no FP8 and no price; the L40S is cheaper although it takes more GPUs."""
    gpus = "hardware=[a100_sxm_80gb, h100_sxm, l40s, h200_sxm]"
    prices = "sizing.prices.gpu_hour_usd={h100_sxm: 2.5, l40s: 0.5}"
    code, said = size(tmp_path, capsys, *LOAD, *FEW, gpus, prices, "sizing.average_rate=53")
    assert code == 0
    rows = answer(tmp_path)["gpus"]
    assert [row["hardware"] for row in rows] == ["l40s", "h100_sxm", "h200_sxm", "a100_sxm_80gb"]
    cheap, fast, unpriced, refused = rows
    assert cheap["gpus"] > fast["gpus"]
    for row in (cheap, fast):
        rate = {"l40s": 0.5, "h100_sxm": 2.5}[row["hardware"]]
        assert row["usd_per_year"] == pytest.approx(rate * 8 * row["servers"] * 8760)
        tokens = 53 * 365 * 86400 * 200 * row["good_tokens_share"]
        assert row["usd_per_million_good_tokens"] == pytest.approx(1e6 * row["usd_per_year"] / tokens)
    assert unpriced["usd_per_million_good_tokens"] is None
    assert "needs FP8 tensor cores; A100-SXM-80GB has none" in refused["why_not"]
    assert "a100_sxm_80gb: No configuration tried runs llama_3_8b" in said
    assert "at the average load, 53/s in 24 h a day" in said
    assert "no price of h200_sxm" in said


def test_a_row_is_what_the_gpu_alone_gets(tmp_path, capsys):
    """The same rate and fleet as with hardware=h100_sxm."""
    assert size(tmp_path, capsys, *LOAD, *FEW, "hardware=[h100_sxm]", "sizing.peak_rate=60")[0] == 0
    assert size(tmp_path, capsys, *LOAD, *FEW, "hardware=h100_sxm", "sizing.peak_rate=60")[0] == 0
    (alone,) = tmp_path.glob("size-llama_3_8b-h100_sxm-*/answer.json")
    best = json.loads(alone.read_text())["options"][0]
    (row,) = answer(tmp_path)["gpus"]
    assert row["requests_per_s_per_instance"] == best["requests_per_s"]
    assert (row["option"], row["gpus"]) == (best["option"], best["fleet"]["gpus"])


def test_without_prices_the_order_says_what_it_is(tmp_path, capsys):
    """Fewest servers, then GPUs, which says nothing of the cost."""
    _, said = size(tmp_path, capsys, *LOAD, *FEW, "hardware=[l40s,h100_sxm]", "sizing.peak_rate=60")
    assert "no prices given (sizing.prices.*), so by servers, then GPUs, and one costs more than another" in said
    assert [row["hardware"] for row in answer(tmp_path)["gpus"]] == ["h100_sxm", "l40s"]


def test_one_price_is_that_of_every_gpu(tmp_path, capsys):
    """Tokens are shared at the peak where there is no average."""
    words = ("hardware=[l40s,h100_sxm]", "sizing.peak_rate=60", "sizing.prices.gpu_hour_usd=2")
    _, said = size(tmp_path, capsys, *LOAD, *FEW, *words)
    assert "at the peak around the clock, because no average is given" in said
    assert all(row["usd_per_million_good_tokens"] for row in answer(tmp_path)["gpus"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hardware=[t4]"], "T4 is too old for TensorRT-LLM: compute capability 7.5. It needs 8.0"),
        (["hardware=[h100_smx,l40s]"], "hardware=h100_smx is not known. .* Did you mean 'h100_sxm'?"),
        (["hardware=[]"], r"'hardware=\[\]' has no GPU in it. Name those"),
        (["hardware=[l40s,]"], r"'hardware=\[l40s,\]' has an empty name in it. Name those"),
        (["hardware=h100_sxm,l40s"], "names several GPUs, but this command takes one. To choose among them: make size"),
        (
            ["hardware=[l40s]", "sizing.rate=3"],
            "sizing.rate=3.0 works for one GPU only. Leave it out, or name only that GPU",
        ),
        (["hardware=[l40s]", "sizing=autoscaled", "sizing.autoscaling.cold_start_s=9"], "A day is replayed on one GPU"),
        (["hardware=[l40s]", "sizing.prices.gpu_hour_usd={l4os: 1}"], "gpu_hour_usd of 'l4os', which is no choice of"),
    ],
)
def test_what_gives_no_table_is_refused(tmp_path, capsys, words, message):
    limits = [] if any("rate=3" in word for word in words) else LOAD
    code, said = size(tmp_path, capsys, *limits, *FEW, *words, "sizing.peak_rate=60")
    assert code == 2
    assert re.search(message, said)


def test_a_fault_of_all_gpus_is_told_once(tmp_path, capsys):
    code, said = size(tmp_path, capsys, *LOAD, "hardware=[l40s,h100_sxm]")
    assert code == 2
    assert said.count("There is no load to size for") == 1


def test_another_group_takes_one_choice_and_says_how_to_run_several(capsys):
    """Hydra would merge them, the last one on top."""
    assert main(["plan", "quant=[fp8,none]"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'quant=fp8,none' has several values, but this command takes one" in said
    assert main(["plan", "hardware=[l40s,h100_sxm]"]) == 2
    assert "make size 'hardware=[l40s,h100_sxm]'" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "hardware=[l40s]"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "'hardware=[l40s]' is a list, and one choice is taken. Write hardware=l40s" in said
    assert main(["plan", "benchmark.concurrency=range(1,5)"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "make sweep 'benchmark.concurrency=range(1,5)' (accuracy)" in said, "bash takes a bare ( as its own"
    assert "[range(1,5)]" not in said, "Hydra composes no such list"
    assert main(["plan", "hardware=choice(l40s,h100_sxm)"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "make sweep 'hardware=choice(l40s,h100_sxm)' (accuracy)" in said
    assert "[choice" not in said


def test_one_gpu_is_no_list():
    assert several_gpus(["hardware=l40s", "sizing.tp=[1,2]"]) is None
    assert several_gpus(["a=1", "hardware=[l40s, l4]"]) == [["a=1", "hardware=l40s"], ["a=1", "hardware=l4"]]


def test_each_gpu_has_its_own_price():
    prices = PriceSettings(server_usd={"l40s": 80_000}, years=4, hosting_usd=3_000)
    assert (prices.of("l40s").server_usd, prices.of("l4").server_usd) == (80_000, None)
    with pytest.raises(ValueError, match=r"server_usd={'l40s': 1\.0} alone"):
        PriceSettings(server_usd={"l40s": 1})
