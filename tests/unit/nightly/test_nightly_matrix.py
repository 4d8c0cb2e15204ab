"""Settings and overrides -> cells: every combination, its overrides, and a name that lasts."""

import pytest

from pipelines.domain.errors import UserError
from pipelines.host.machine import GpuFacts, Machine
from pipelines.nightly.facts import LOADS, protocol
from pipelines.nightly.matrix import cells, own_overrides
from pipelines.plan.plan import make_plan
from pipelines.settings.compose import load
from pipelines.store.store import Store
from tests.support.nights import nightly_settings


def names(settings, *overrides):
    return [cell.name for cell in cells(settings, overrides)]


def test_every_combination_is_a_cell():
    settings = nightly_settings(matrix={"model": ["tiny_gemma", "tiny_llama"], "quant": ["none", "fp8"]})
    assert names(settings) == ["tiny_gemma none", "tiny_gemma fp8", "tiny_llama none", "tiny_llama fp8"]


def test_an_axis_is_replaced_and_a_list_makes_a_new_one():
    assert names(nightly_settings(), "quant=int4_awq") == ["int4_awq"]
    assert names(nightly_settings(), "quant=fp8", "build.tp_size=1,2") == ["fp8 build.tp_size=1", "fp8 build.tp_size=2"]


def test_overrides_of_all_some_and_the_command_line_in_that_order():
    settings = nightly_settings(
        set=["build.max_batch_size=8"], cells=[{"when": {"quant": "fp8"}, "set": ["build.max_batch_size=16"]}]
    )
    plain, fp8 = cells(settings, [])
    assert plain.overrides == ("quant=none", "build.max_batch_size=8")
    assert fp8.overrides == ("quant=fp8", "build.max_batch_size=16")
    assert cells(settings, ["build.max_batch_size=4"])[1].overrides == ("quant=fp8", "build.max_batch_size=4")


def test_the_key_says_what_was_asked_for_and_not_where_or_with_which_questions():
    same = cells(nightly_settings(), ["paths.store=/x", "benchmark.duration_s=3", "nightly.window=30"])[0].key
    assert same == cells(nightly_settings(), [])[0].key
    assert same != cells(nightly_settings(), ["build.max_batch_size=4"])[0].key


def test_overrides_of_the_run_are_told_from_those_of_the_cells():
    words = ["nightly=gpu", "nightly.window=9", "quant=fp8", "paths.store=/x", "report.folder=/y"]
    assert own_overrides(words) == ["nightly=gpu", "nightly.window=9", "paths.store=/x", "report.folder=/y"]


def test_a_word_that_is_no_override():
    with pytest.raises(UserError, match=r"'quant' is not a valid override"):
        cells(nightly_settings(), ["quant"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nightly=gpuu", r"nightly=gpuu is not known.*Did you mean 'gpu'"),
        ("nightly.windwo=3", r"'nightly\.windwo' is not a known setting"),
        ("nightly.window=2", r"nightly\.window='2' is not valid.*greater than or equal to 4"),
        ("nightly.matrix.quant=[]", r"matrix\.quant=\[\], which is no cell"),
        ("nightly.cells=[{when:{qant:fp8},set:[]}]", r"'qant', which is no axis; axes are model, quant, workload"),
        ("nightly.expect.accepted=[{cell:a,metric:b,since:soon,reason:c}]", r"since='soon' is not valid"),
        (
            "nightly.expect.accepted=[{cell:a,metric:b,since:2026-13-45,reason:c}]",
            "'2026-13-45' is no ISO date",
        ),
    ],
)
def test_a_mistake_in_the_group_is_named(override, message):
    with pytest.raises(UserError, match=message):
        load([override])


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_cell_of_the_project_composes(name):
    found = cells(load([f"nightly={name}"]).nightly, [])
    assert len({cell.key for cell in found}) == len(found) >= 16
    for cell in found[:1] + found[-1:]:
        assert load(cell.overrides).model.name in cell.name


def test_the_protocol_is_the_question_without_its_loads():
    asked = protocol(load(["benchmark.concurrency=[3]"]))
    assert asked["workload.isl.mean"] == 128
    assert not set(LOADS) & set(asked)


def test_an_h100_runs_the_whole_gpu_matrix_but_nvfp4(tmp_path):
    """The rules know before the night which cells cannot be; packages that only the container has do not count here."""
    gpu = GpuFacts("NVIDIA H100 80GB HBM3", 9.0, 80 * 2**30)
    machine = Machine(32, 2**38, (gpu,), "", has_tensorrt_llm=True, platform="test")
    refused = set()
    for cell in cells(load(["nightly=gpu"]).nightly, ["workload=fixed", f"paths.store={tmp_path}"]):
        try:
            make_plan(load(cell.overrides), "all", Store(tmp_path), machine)
        except UserError as error:
            if any("Python package" not in str(fault) for fault in error.faults):
                refused.add(cell.name)
    assert refused == {"gemma_2b nvfp4 fixed", "llama_3_1_8b nvfp4 fixed"}


@pytest.mark.parametrize("more", [[], ["model=tiny_llama"]])
def test_a_folder_is_measured_under_its_own_name(more):
    settings = nightly_settings(matrix={"model": ["tiny_gemma", "tiny_llama"], "quant": ["fp8"]})
    (cell,) = cells(settings, [*more, "model.path=/my/llama"])
    assert (cell.name, cell.overrides) == ("model.path=/my/llama fp8", ("model.path=/my/llama", "quant=fp8"))
