"""The commands as functions: records, their text, and their page in a notebook."""

import html
import re
import sys
from types import SimpleNamespace

import pytest

from pipelines import api
from pipelines.document.blocks import Document
from pipelines.domain.errors import UserError
from pipelines.host import screen
from pipelines.plan.plan import Plan
from pipelines.run import commands
from pipelines.settings.groups import project_file
from tests.conftest import ROOT

SIZED = ("model=llama_3_8b", "quant=fp8", "hardware=h100_sxm", "workload.isl=2000", "workload.osl=200")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(screen, "_typed", {})  # how commands are named outlasts a call
    return tmp_path


def page_of(shown):
    (content,) = re.findall(r'<iframe srcdoc="([^"]*)"', shown._repr_html_())
    return html.unescape(content)


def test_a_plan_is_a_record_a_text_and_a_page(folder):
    planned = api.plan("model=tiny_llama", "quant=int4_awq", "plan.target=build")
    assert isinstance(planned.record, Plan)
    assert [step.node.id for step in planned.record.steps] == ["quantize", "build"]
    assert "2 of 2 stages to run." in repr(planned)
    page = page_of(planned)
    assert page.startswith("<!doctype html>")
    assert "tiny_llama int4_awq" in page
    assert "never made before" in page
    assert list(folder.iterdir()) == []  # nothing was written


def test_a_page_that_cannot_be_drawn_is_the_text_with_the_reason():
    def document() -> Document:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    shown = api.ShownRecord(None, "a < b", document)._repr_html_()
    assert shown.startswith("<pre>a &lt; b\n\nNo page: This needs the Python package &#x27;matplotlib&#x27;")
    assert "pip install" in shown


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: api.plan("quant=fp9"), "quant=fp9 is not known"),
        (lambda: api.plan(["quant=fp8"]), r"\['quant=fp8'\] is not an override.*f\(\*list\)"),
        (lambda: api.plan("quant", "fp8"), r"'quant' is not a valid override"),
        (lambda: api.run("serve"), "'serve' is not a target.*until it is stopped"),
        (lambda: api.run("bild"), "'bild' is not a target.*build"),
        (lambda: api.plan("config=missing.yaml"), "missing.yaml' is not a file"),
        (lambda: api.size("model=llama_3_8b"), "sizing"),
    ],
    ids=["value", "list", "word", "serve", "target", "file", "size"],
)
def test_faults_are_those_of_the_command(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_commands_are_named_as_they_are_typed_here(monkeypatch):
    """Without a clone's Makefile in this folder there is no `make`, in errors, texts and pages."""
    with pytest.raises(UserError, match=r"/x' is not a file\. To write one: trtllm-pipelines init") as caught:
        api.plan("config=x")
    assert "make " not in str(caught.value)
    with pytest.raises(UserError, match="trtllm-pipelines sweep quant=fp8,none"):
        api.plan("quant=fp8,none")
    shown = api.ShownRecord(None, "To run it: make build", lambda: Document("To run it: make build", "", (), (), ()))
    assert repr(shown) == "To run it: trtllm-pipelines build"
    assert "make build" not in page_of(shown)
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="make sweep quant=fp8,none"):
        api.plan("quant=fp8,none")


def test_after_ctrl_c_in_the_import_of_torch_it_says_to_restart(monkeypatch):
    """PyTorch itself would fail with "partially initialized module 'torch' has no attribute ..." from then on."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace())
    with pytest.raises(UserError, match=r"PyTorch was interrupted while it loaded.* Restart the kernel"):
        api.run("build")
    assert "to run" in repr(api.plan("quant=fp8"))


@pytest.mark.parametrize("target", ["benchmark", "all"])
def test_ctrl_c_in_a_benchmark_ends_the_script_too(monkeypatch, target):
    """Not only this one of its benchmarks; the command exits with 130."""
    facts = {"complete": False, "reason": "interrupted"}
    outcomes = [SimpleNamespace(artifact=SimpleNamespace(facts=facts))]
    monkeypatch.setattr(commands, "run_to", lambda *_: (None, None, SimpleNamespace(outcomes=outcomes)))
    with pytest.raises(KeyboardInterrupt):
        api.run(target)


def test_a_project_file_counts_for_one_call(folder):
    (folder / "team.yaml").write_text("build:\n  max_batch_size: 17\n")
    assert api.plan("config=team.yaml", "plan.target=build").record.settings.build.max_batch_size == 17
    assert project_file() is None
    assert api.plan("plan.target=build").record.settings.build.max_batch_size != 17


def test_a_simulation_has_a_record_per_policy():
    simulated = api.simulate("benchmark.num_requests=40")
    assert [each.outcome.policy for each in simulated.record] == ["static", "inflight"]
    assert "in-flight" in repr(simulated)
    assert "<svg" in page_of(simulated)


def test_a_size_is_the_record_of_its_page(folder):
    sized = api.size(*SIZED, "sizing.average_rate=53", "sizing.slo.ttft_ms=500")
    fleet = sized.record.answer.chosen.fleet
    assert f"{fleet.instances} instances on {fleet.servers} server" in page_of(sized)
    assert list(folder.iterdir()) == []
    by_rate = api.size("sizing.rate=10", "sizing.measured_gpus=1", "sizing.average_rate=53", *SIZED[:3])
    assert by_rate.record["fleet"]["instances"] * 10 >= 65  # the peak
    assert "7 instances on 1 server" in page_of(by_rate)
