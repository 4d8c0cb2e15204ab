"""A project's own settings: pipelines.yaml, and presets in folders beside it."""

import os

import pytest
import yaml

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.run.config_command import init
from pipelines.settings.by_hydra import compose_config, to_raw
from pipelines.settings.compose import compose, load
from pipelines.settings.groups import CHOSEN_FILE, CONF, choices, project_file
from pipelines.settings.model import BUNDLED
from pipelines.settings.plain import compose_plain

HEAD = "# @package _global_\n"
TEXT = """\
defaults:
  - override /model: ours
  - override /quant: int4_awq
build:
  max_batch_size: 17
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a model and an experiment of its own; the current folder is one below it."""
    monkeypatch.setenv(CHOSEN_FILE, "")
    (tmp_path / "pipelines.yaml").write_text(TEXT)
    for name in ("model", "experiment", "below"):
        (tmp_path / name).mkdir()
    tiny = (CONF / "model" / "tiny_llama.yaml").read_text()
    (tmp_path / "model" / "ours.yaml").write_text(tiny.replace("name: tiny_llama", "name: ours"))
    (tmp_path / "experiment" / "team.yaml").write_text("# @package _global_\nbuild:\n  max_batch_size: 19\n")
    monkeypatch.chdir(tmp_path / "below")
    return tmp_path


@pytest.mark.parametrize(
    ("overrides", "model", "qformat", "max_batch_size"),
    [
        ([], "ours", "int4_awq", 17),
        (["quant=fp8"], "ours", "fp8", 17),
        (["experiment=team"], "ours", "int4_awq", 19),
        (["experiment=team", "build.max_batch_size=3"], "ours", "int4_awq", 3),
        (["model=tiny_gemma", "quant=auto"], "tiny_gemma", "auto", 17),
    ],
)
def test_it_stands_between_conf_and_the_command_line(project, overrides, model, qformat, max_batch_size):
    plain = compose_plain(overrides)
    assert plain == to_raw(compose_config(overrides)), "Hydra composes the same"
    assert (plain["model"]["name"], plain["quant"]["qformat"]) == (model, qformat)
    assert load(overrides).build.max_batch_size == max_batch_size


def test_what_is_not_plain_sees_it_too(project):
    assert compose(["workload.isl='21'"])["model"]["name"] == "ours"


def test_without_it_everything_is_as_before(project, tmp_path_factory, monkeypatch):
    monkeypatch.setenv(CHOSEN_FILE, "none")
    without = compose([])
    monkeypatch.setenv(CHOSEN_FILE, "")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert compose([]) == without
    assert "ours" not in choices("model")


def test_its_presets_are_choices(project, capsys):
    assert "ours" in choices("model")
    assert main(["--candidates", "trtllm-pipelines build model=ou"]) == 0
    assert capsys.readouterr().out == "model=ours\n"


def test_config_says_where_a_value_comes_from(project, capsys):
    assert main(["config", "quant=fp8"]) == 0
    shown = capsys.readouterr()
    file = project / "pipelines.yaml"
    assert f"  max_batch_size: 17  # {file}\n" in shown.out
    assert "  qformat: fp8  # command line\n" in shown.out
    assert yaml.safe_load(shown.out) == compose(["quant=fp8"])
    assert shown.err == f"Settings of {file} apply.\n"


def test_a_preset_that_conf_hides_is_named(project, capsys):
    (project / "quant").mkdir()
    (project / "quant" / "fp8.yaml").write_text("qformat: int8_sq\n")
    assert main(["config", "quant=fp8"]) == 0
    shown = capsys.readouterr()
    assert "  qformat: fp8  #" in shown.out
    assert "Not used, because the program has choices of the same name: quant/fp8.yaml.\n" in shown.err


def test_no_file_is_named_as_the_word_for_none(project, capsys):
    assert main(["init", "config=none"]) == 2
    assert "config=none uses no file, so none can have that name" in " ".join(capsys.readouterr().err.split())
    assert not (project / "below" / "none").exists()


def test_config_shows_values_whose_keys_are_numbers(project, capsys):
    assert main(["config", "lora=adapters", "lora.adapters={1:/x}"]) == 0
    assert "  adapters:  # command line\n    1: /x\n" in capsys.readouterr().out


def test_another_file_by_name_also_for_the_processes_it_starts(project, capsys):
    (project / "team.yaml").write_text("build:\n  max_batch_size: 23\n")
    assert main(["config", "config=../team.yaml"]) == 0
    assert f"max_batch_size: 23  # {project / 'below' / '../team.yaml'}" in capsys.readouterr().out
    assert project_file() == project / "below" / "../team.yaml"
    assert os.environ[CHOSEN_FILE] == str(project_file())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quant: fp8\n", r"quant=fp8 chooses for a group.*`- override /quant: fp8`"),
        ("defaults: [{override /quant: fp9}]\n", r"quant=fp9 is not known.*Did you mean 'fp8'"),
        ("defaults: [{override /quantt: fp8}]\n", r"quantt=fp8 is not known.*Groups: .*quant, "),
        ("defaults: [{override /experiment: team}]\n", r"experiment=team stands above this file"),
        ("build:\n  max_batch_size: many\n", r"pipelines.yaml: build.max_batch_size='many' is not valid"),
        ("build:\n  max_batch_sizes: 3\n", r"pipelines.yaml: build.max_batch_sizes is not a known key"),
        ("bild:\n  max_batch_size: 3\n", r"pipelines.yaml: bild.* is not a known key"),
        ("nightly:\n  least: 3\n", r"pipelines.yaml: nightly\.least is no longer a setting\. Four earlier nights"),
        (
            "sizing:\n  calibration: x\n",
            r"pipelines.yaml: sizing\.calibration is not a known setting\. It is now .sizing\.fit",
        ),
        ("- build\n", r"is \['build'\], not a mapping of groups"),
        (
            "colour:\n  x: 3\n",
            r"pipelines.yaml: colour is not a known key\. .*`make config` prints all groups",
        ),
        ("build:\n  tp_size: 1\nbuild:\n  pp_size: 1\n", r"cannot be read: it has 'build' twice, again in line 3\.$"),
        ("build: [\n", r"pipelines.yaml' cannot be read: line 2, column 1: [^\"]*$"),
        ("build: \0\n", r"pipelines.yaml' cannot be read: [^\"]*at position 7\.$"),
        ("defaults: fp8\n", r"`defaults` has 'fp8', which chooses for no group\. Write a list of `- override /quant"),
        ("defaults: [quant]\n", r"`defaults` has 'quant', which chooses for no group\."),
        ("defaults: {quant: fp8}\n", r"`defaults` has \{'quant': 'fp8'\}, which chooses for no group\."),
        (
            "defaults: [{override /quant: fp8}, {override /quant: none}]\n",
            r"pipelines\.yaml': `defaults` chooses for quant twice",
        ),
        (
            "defaults: [{override /hydra/launcher: jobli}]\n",
            r"hydra/launcher=jobli is not known.*one of basic, joblib, slurm\. Did you mean 'joblib'",
        ),
        ("quant.qformat: fp8\n", r"quant\.qformat is a key with a dot in it\. Write quant: \{qformat: \.\.\.\}$"),
    ],
)
def test_faults_name_the_file(project, text, message):
    (project / "pipelines.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load([])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# ours\n# @package _global_\nbuild: {}\n", r"team.yaml' sets keys of any group.*first line: # @package"),
        ("build:\n  max_batch_size: 3\n", r"team.yaml' sets keys of any group.*first line: # @package _global_"),
        (HEAD + "build: [\n", r"team.yaml' cannot be read: .*line 3"),
        ("- build\n", r"team.yaml' is \['build'\], not a mapping"),
        (HEAD + "defaults: [{override /workload: chatt}]\n", r"team.yaml': workload=chatt is not known.*'chat'"),
        (
            HEAD + "defaults: [{/workload: chat}]\n",
            r"team.yaml': '/workload: chat' does not.*`- override /workload: chat`",
        ),
        (HEAD + "defaults: [{override workload: chat}]\n", r"does not choose for the group workload"),
        (HEAD + "build:\n  max_batch_size: many\n", r"team.yaml: build.max_batch_size='many' is not valid"),
        (HEAD + "bild:\n  max_batch_size: 3\n", r"team.yaml: bild.* is not a known key"),
    ],
)
def test_faults_of_a_preset_name_its_file(project, text, message):
    """The project's file sets the same key, with a good value."""
    (project / "experiment" / "team.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load(["experiment=team"])
    assert load([]).build.max_batch_size == 17


def test_a_preset_of_a_model_is_a_path(project):
    (project / "model" / "ours.yaml").write_text(f"path: {BUNDLED}/models/tiny_llama\n")
    (project / "workload").mkdir()
    (project / "workload" / "mine.yaml").write_text("defaults: [chat, _self_]\nturns: 7\n")
    found = load(["workload=mine"])
    assert (found.model.label, found.model.is_bundled, found.workload.turns) == ("tiny_llama", True, 7)


def test_a_fault_of_the_command_line_is_not_the_files(project):
    with pytest.raises(UserError, match=r"^build.max_batch_size='many'"):
        load(["build.max_batch_size=many"])


def test_a_file_above_of_another_user_is_refused(project, monkeypatch):
    owner = (project / "pipelines.yaml").stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    monkeypatch.setattr("pipelines.settings.groups.ROOT_USER", owner + 2)
    with pytest.raises(UserError, match=r"belongs to another user.*config=/.*pipelines.yaml"):
        project_file()
    monkeypatch.chdir(project)
    assert project_file() == project / "pipelines.yaml", "here it is this folder's own"


def test_a_broken_link_is_not_passed_over(project):
    (project / "below" / "pipelines.yaml").symlink_to("gone.yaml")
    with pytest.raises(UserError, match=r"below/pipelines.yaml' is a link to 'gone\.yaml', which is not a file"):
        load([])


def test_a_folder_of_that_name_is_not_passed_over(project):
    (project / "below" / "pipelines.yaml").mkdir()
    with pytest.raises(UserError, match=r"below/pipelines.yaml' is a folder"):
        load([])


def test_a_file_that_is_not_there(project):
    assert main(["plan", "config=no.yaml"]) == 2


def test_init_writes_what_every_command_then_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CHOSEN_FILE, "")
    words = ["model=tiny_llama", "quant=int4_awq", "build.max_batch_size=64", "benchmark.concurrency=[1,8]"]
    with_words = compose(words)
    assert main(["init", *words]) == 0
    assert compose([]) == with_words
    assert (tmp_path / "pipelines.yaml").read_text().startswith("# The settings of a project")
    assert main(["init"]) == 2
    assert "'pipelines.yaml' already exists" in capsys.readouterr().err
    monkeypatch.setenv(CHOSEN_FILE, str(tmp_path / "team.yaml"))
    assert main(["init"]) == 0
    monkeypatch.setenv(CHOSEN_FILE, "none")
    nothing = compose([])
    monkeypatch.setenv(CHOSEN_FILE, str(tmp_path / "team.yaml"))
    assert compose([]) == nothing, "an example alone changes nothing"


def test_init_refuses_what_is_wrong_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CHOSEN_FILE, "")
    assert main(["init", "quant=fp9"]) == 2
    assert "quant=fp9 is not known" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_init_names_the_file_that_it_cannot_write(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(CHOSEN_FILE, str(tmp_path / "file" / "team.yaml"))
    with pytest.raises(UserError, match=r"team\.yaml' cannot be written: File exists\. Name another: make init"):
        init(["quant=fp8"])


def test_init_names_the_word_that_it_cannot_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CHOSEN_FILE, "")
    with pytest.raises(UserError, match=r"^init cannot write 'model\.path=/a\\ b' into the file\. Leave it out"):
        init(["quant=fp8", r"model.path=/a\ b"])
