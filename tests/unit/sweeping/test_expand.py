"""A sweep's words: which cells they make, and what is refused before anything is written."""

import importlib.util

import pytest

from pipelines.domain.errors import UserError
from pipelines.settings.by_hydra import compose_config
from pipelines.settings.compose import compose
from pipelines.settings.groups import CHOSEN_FILE, CONF
from pipelines.store.store import Store
from pipelines.sweep import launch
from pipelines.sweep.cells import SweepCell, cells_of
from pipelines.sweep.launch import BASIC, SLURM, _judged, check_launcher, expand, run_cells
from tests.unit.core.test_machine import MACHINE


def combinations(tmp_path, *words):
    return [list(cell) for cell in expand(words, tmp_path / "sweep").combinations]


def test_lists_are_multiplied_in_the_order_of_the_words(tmp_path):
    assert combinations(tmp_path, "quant=fp8,int8_wo", "model=tiny_llama", "eval.limit=1,2") == [
        ["quant=fp8", "model=tiny_llama", "eval.limit=1"],
        ["quant=fp8", "model=tiny_llama", "eval.limit=2"],
        ["quant=int8_wo", "model=tiny_llama", "eval.limit=1"],
        ["quant=int8_wo", "model=tiny_llama", "eval.limit=2"],
    ]


def test_a_pattern_takes_every_choice_that_matches(tmp_path):
    assert combinations(tmp_path, "quant=glob(int8*)") == [["quant=int8_sq"], ["quant=int8_wo"]]


def test_words_of_hydra_are_no_part_of_a_cell(tmp_path):
    sweep = expand(["hydra/launcher=slurm", "hydra.launcher.partition=h100", "quant=fp8,int8_wo"], tmp_path / "it's")
    assert sweep.combinations == (("quant=fp8",), ("quant=int8_wo",))
    assert (sweep.launcher, sweep.config.hydra.launcher.partition) == (SLURM, "h100")
    assert sweep.config.hydra.launcher.submitit_folder == f"{tmp_path}/it's/slurm/%j"


def test_without_a_launcher_cells_follow_each_other(tmp_path):
    assert expand(["quant=fp8,int8_wo"], tmp_path).launcher == BASIC


def test_only_the_words_that_differ_are_shown(tmp_path):
    cells = cells_of("evaluate", expand(["paths.store=/x", "quant=fp8,int8_wo"], tmp_path).combinations)
    assert [(cell.number, cell.words) for cell in cells] == [(1, "quant=fp8"), (2, "quant=int8_wo")]
    assert cells[0].overrides == ("paths.store=/x", "quant=fp8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["hydra/launcher=slrum"],
            r"hydra/launcher=slrum is not known\..* basic, joblib, slurm\. .*'slurm'",
        ),
        (["eval.limit=interval(1,5)"], "does not support sweep type"),
        (["quant=fp8,int8_wo", "modle=x"], r"'modle' is not a known setting\. Did you mean 'model'"),
        (["quant=fp8,"], "'quant=fp8,' is not a valid override"),
        (
            ["hydra/launcher=slurm", "hydra.launcher.partitoin=x"],
            r"partitoin is not an option .*Did you mean 'partition'",
        ),
    ],
)
def test_a_mistake_is_named(tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        expand(words, tmp_path)


def test_a_word_without_values_is_told_to_list_them(tmp_path):
    with pytest.raises(
        UserError, match=r"'eval.limit=interval\(1,5\)' names no values.*List the values: eval.limit=1,2,3"
    ):
        expand(["eval.limit=interval(1,5)"], tmp_path)


def test_what_is_given_twice_counts_once_with_the_last_values(tmp_path):
    assert combinations(tmp_path, "quant=fp8,int8_wo", "eval.limit=1", "quant=none") == [["quant=none", "eval.limit=1"]]


def test_a_value_that_is_listed_twice_is_one_cell(tmp_path):
    """Else it would be judged as two results, each more strictly."""
    assert combinations(tmp_path, "quant=fp8,int8_wo,fp8") == [["quant=fp8"], ["quant=int8_wo"]]


def test_a_projects_file_chooses_the_launcher(tmp_path, monkeypatch):
    file = tmp_path / "pipelines.yaml"
    monkeypatch.setenv(CHOSEN_FILE, str(file))
    file.write_text("defaults: [{override /hydra/launcher: joblib}]\nhydra: {launcher: {n_jobs: 2}}\n")
    assert expand(["quant=fp8,none"], tmp_path / "sweep").launcher_word == "joblib"
    file.write_text("hydra: {launcher: {n_job: 2}}\n")
    with pytest.raises(UserError, match=r"pipelines\.yaml': Hydra refuses .*n_job"):
        expand(["quant=fp8,none"], tmp_path / "sweep")


def test_another_sweeper_is_refused(tmp_path):
    sweep = expand(["quant=fp8"], tmp_path)
    sweep.config.hydra.runtime.choices["hydra/sweeper"] = "optuna"
    with pytest.raises(UserError, match="hydra/sweeper=optuna cannot be used here"):
        check_launcher(sweep, "evaluate")


def test_hydra_has_the_class_that_a_launcher_is_set_up_with(tmp_path):
    """It is private to Hydra; see `_launcher`."""
    from hydra._internal.callbacks import Callbacks
    from hydra.types import HydraContext

    assert HydraContext.__annotations__["callbacks"] == "Callbacks"
    assert Callbacks(expand(["quant=fp8"], tmp_path).config)


def test_a_wrong_value_in_a_list_is_refused_before_anything_runs(tmp_path):
    words = ["quant=fp8,fp9", f"paths.runs={tmp_path}/runs", f"paths.store={tmp_path}/store"]
    with pytest.raises(UserError, match=r"quant=fp9 is not known\. .*Did you mean 'fp8'"):
        run_cells("evaluate", words)
    assert list(tmp_path.iterdir()) == []


def test_what_no_cell_can_run_without_is_said_once(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    missing = "matplotlib"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else real(name, *rest))
    words = ["quant=none,int8_wo", "model=tiny_llama", f"paths.runs={tmp_path}/runs", f"paths.store={tmp_path}/store"]
    with pytest.raises(UserError, match=r"needs the Python package 'matplotlib'") as caught:
        run_cells("all", [*words, "engine=openvino"])
    assert str(caught.value).count(missing) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_good_values_is_no_mistake(tmp_path):
    with pytest.raises(UserError) as caught:
        expand(["quant=fp8,int8_wo", "model=glob(tiny*)", "modle=x,y", "hydra/launcher=slrum"], tmp_path)
    assert [fault.message.split()[0] for fault in caught.value.faults] == ["hydra/launcher=slrum", "'modle'"]


def test_without_slurm_the_launcher_is_refused(tmp_path, programs):
    programs("sbatch", "true")
    with pytest.raises(UserError, match=r"hydra/launcher=slurm needs Slurm's srun, squeue, scancel, not found on PATH"):
        check_launcher(expand(["hydra/launcher=slurm"], tmp_path), "evaluate")


@pytest.mark.parametrize("word", ["joblib", "slurm"])
def test_without_its_package_a_launcher_is_refused(monkeypatch, word):
    monkeypatch.setattr(launch, "_is_installed", lambda _name: False)
    (fault,) = launch.launcher_faults(["quant=fp8", f"hydra/launcher={word}"])
    assert f"hydra/launcher={word} needs the Python package 'hydra-" in fault.message
    assert "make setup" in fault.todo


def test_an_installed_package_is_found():
    assert launch._is_installed("hydra-joblib-launcher")
    assert not launch._is_installed("hydra-nothing-launcher")


def test_benchmarks_side_by_side_are_refused(tmp_path):
    sweep = expand(["hydra/launcher=joblib"], tmp_path)
    check_launcher(sweep, "evaluate")
    with pytest.raises(UserError, match="several benchmarks on this machine at once"):
        check_launcher(sweep, "all")
    check_launcher(expand(["hydra/launcher=joblib", "hydra.launcher.n_jobs=1"], tmp_path), "all")


@pytest.mark.parametrize("word", ["hydra/launcher=slurm", "hydra.launcher.n_jobs=2"])
def test_a_single_run_has_no_launcher(word):
    with pytest.raises(UserError, match=rf"{word} starts the cells of a sweep; this command has one"):
        compose_config([word])


def test_every_launcher_file_says_its_command():
    files = list((CONF / "hydra" / "launcher").glob("*.yaml"))
    assert files
    assert all(f"make sweep hydra/launcher={path.stem}" in path.read_text() for path in files)


def test_a_cell_that_cannot_run_here_is_failed_before_any_starts(tmp_path):
    """For another machine it waits, because that machine may have what this one lacks."""
    words = ("engine=tensorrt_llm", "model=tiny_llama", "quant=fp8")
    cell, raw = SweepCell(1, "build", words, "quant=fp8"), compose(words)
    judged = _judged(cell, raw, Store(tmp_path), MACHINE, here=True)
    assert judged.state == "failed"
    assert judged.reason.startswith("engine=tensorrt_llm cannot run here: there is no NVIDIA GPU")
    assert _judged(cell, raw, Store(tmp_path), MACHINE, here=False).state == "waiting"
