"""Every setting that names a path refuses one that cannot be, with its name and value, before anything is written."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from pipelines.cli.main import main
from pipelines.domain.errors import UserError
from pipelines.host.disk import check_folders
from pipelines.settings.base import Group
from pipelines.settings.compose import load
from pipelines.settings.root import Settings

GPU = "plan engine=tensorrt_llm model=llama_3_8b quant=fp8 hardware=h100_sxm"
SIZE = "size sizing.average_rate=5 hardware=h100_sxm model=llama_3_8b"
WRITTEN = {
    "paths.store": ("plan", "build", "verify", "prune", "report", "compare quant=none,fp8"),
    "paths.runs": ("plan", "evaluate", "simulate", "compare quant=none,fp8"),
    "report.folder": ("plan", "all", "report", SIZE, "compare quant=none,fp8", "nightly"),
    "report.mlflow": ("plan", "all", "report"),
    "manifests.folder": ("manifests",),
    "cluster.folder": ("scripts cluster=slurm engine=tensorrt_llm model=gemma_2b hardware=h100_sxm",),
    "nightly.history": ("nightly", "nightly nightly.measure=false"),
    "stage.link": ("stage stage.name=quantize",),
    "migrate.folder": ("migrate engine=tensorrt_llm model=llama_3_8b quant=fp8 hardware=h100_sxm",),
}
READ = {
    "verify.path": "verify",
    "doctor.kubeconfig": "doctor",
    "migrate.path": "migrate",
    "llm_api.file": "plan engine=tensorrt_llm_llmapi model=llama_3_8b quant=fp8 hardware=h100_sxm",
    "paths.edge": "build engine=tensorrt_edge model=tiny_llama quant=none",
    "model.path": "plan",
    "engine.path": "plan",
    "calibration.path": "plan calibration=local quant=fp8",
    "recover.teacher": "plan recover=distill",
    "eval.dataset_path": "plan",
    "eval.path": "plan eval=local",
    "lora.adapters": "plan quant=none lora=adapters",
    "fidelity.path": "plan",
    "fidelity.reference_path": "plan plan.target=fidelity",
    "diagnose.checkpoint": "plan plan.target=diagnose",
    "diagnose.engine": "plan plan.target=diagnose",
    "diagnose.repository": "plan plan.target=diagnose",
    "speculative.heads_path": f"{GPU} speculative=medusa",
    "multimodal.path": f"{GPU} multimodal=llava",
    "image.pip_config": "image engine=openvino",
    "serving.repository": "serve",
    "serving.chat_template": "plan",
    "serving.tritonserver": "plan",
    "workload.isl": "plan",
    "workload.trace": "plan",
    "report.against": "report",
    "sizing.measured": "calibrate",
    "sizing.fit": SIZE,
}
ELSEWHERE = {"cluster.server", "cluster.mounts", "paths.trtllm_examples", "nightly.issue"}
"""They are on other machines, or in NVIDIA's container; the file for an issue has a test of its own."""
WORD = {
    "lora.adapters": "{{1:{}}}",
    "workload.isl": "{{distribution:empirical,file:{}}}",
    "report.mlflow": "file:{}",
}


@pytest.fixture
def bad(tmp_path: Path) -> SimpleNamespace:
    """Places that hold no folder: a file and what is below it, a dangling link and what is below it, a circle."""
    file, link, circle = tmp_path / "file", tmp_path / "link", tmp_path / "circle"
    file.write_text("x\n")
    link.symlink_to(tmp_path / "nowhere")
    circle.symlink_to(circle)
    return SimpleNamespace(file=file, below=file / "x", link=link, below_link=link / "x", circle=circle)


def refusal(key: str, path: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says on standard error, without line breaks, after it has written nothing."""
    before = sorted(tmp_path.rglob("*"))
    usual = {"paths.store": tmp_path / "store", "paths.runs": tmp_path / "runs"}
    words = [*command.split(), f"{key}={WORD.get(key, '{}').format(path)}"]
    assert main([*words, *(f"{name}={place}" for name, place in usual.items() if name != key)]) == 2, (key, path)
    assert sorted(tmp_path.rglob("*")) == before, (key, path)
    return " ".join(capsys.readouterr().err.split())


def named(group: type[Group], prefix: str = "") -> set[str]:
    """Settings whose values are paths; of a group that several settings share, that of the first."""
    found = set()
    for name, field in group.model_fields.items():
        kinds: list[Any] = [field.annotation]
        for kind in kinds:
            kinds += get_args(kind)
        if Path in kinds:
            found.add(prefix + name)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Group)]
        found |= {each for kind in inner for each in named(kind, f"{prefix}{name}.")}
    return found


def test_every_path_is_in_a_table() -> None:
    lengths = {
        "workload.isl.file",
        "workload.osl.file",
        "workload.mix.isl.file",
        "workload.mix.osl.file",
        "sizing.isl.file",
        "sizing.osl.file",
    }
    draft = {"speculative.draft.path"}
    assert named(Settings) - lengths - draft <= {*WRITTEN, *READ} | ELSEWHERE


@pytest.mark.parametrize("key", WRITTEN)
def test_a_folder_that_cannot_be_written_is_refused(key, bad, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    monkeypatch.setattr("pipelines.plan.checks._reported", lambda *_: [])  # mlflow need not be installed
    monkeypatch.setattr("pipelines.report.report_command.mlflow_fault", lambda _: None)
    for number, command in enumerate(WRITTEN[key]):
        places = vars(bad) if number == 0 else {"below": bad.below}
        for name, path in places.items():
            if key in ("stage.link", "report.mlflow") and name in ("link", "circle", "file"):
                continue  # a link is replaced, and a file is refused as a link that exists
            said = refusal(key, path, command, tmp_path, capsys)
            given = path.parent if key == "stage.link" else path
            assert f"{key}='{given}'" in said, (command, said)


@pytest.mark.parametrize("key", READ)
def test_a_path_to_nothing_is_refused(key, bad, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")
    for path in (bad.below, bad.link, bad.circle):
        said = refusal(key, path, READ[key], tmp_path, capsys)
        assert key in said
        assert str(path) in said, (path, said)


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch, subtests):
    """Settings that are read beside the same words are given together."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").write_text("x: 1\n")
    together = defaultdict(dict)
    for key in (*WRITTEN, *READ, *ELSEWHERE):
        _, *words = READ.get(key, WRITTEN.get(key, ("plan",))[0]).split()
        word = {"cluster.mounts": "[{}]"}.get(key, WORD.get(key, "{}"))
        together[tuple(words)][key] = f'"{word.format("~/x")}"' if key == "report.mlflow" else word.format('"~/x"')
    for words, given in together.items():
        settings = load([*words, *(f"{key}={word}" for key, word in given.items())]).model_dump(mode="json")
        for key in given:
            with subtests.test(setting=key):
                found = settings
                for name in key.split("."):
                    found = found[name]
                assert str(tmp_path / "x") in str(found)
                assert "~" not in str(found)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "paths.store='~nobody-of-this-name/x'",
            r"paths\.store is '~nobody-of-this-name/x', and this machine knows no",
        ),
        (
            "paths.store=/a/" + "n" * 300,
            r"paths\.store is '/a/n+\.\.\.', where 'n+\.\.\.' has 300 bytes: give at most 255",
        ),
        ("model.path=" + "/n" * 2100, r"model\.path is .* has 4,200 bytes: give at most 4,095"),
        ("lora.adapters={1:" + "n" * 256 + "}", r"lora\.adapters is .* has 256 bytes"),
    ],
)
def test_a_path_that_no_file_system_takes_is_refused(word, said):
    with pytest.raises(UserError, match=said):
        load([word])


def test_a_folder_of_others_is_refused(tmp_path, monkeypatch):
    check_folders({"report.folder": tmp_path / "new" / "folder"})
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(UserError, match=r"report\.folder='.*folder' is not writable"):
        check_folders({"report.folder": tmp_path / "new" / "folder"})


def test_nobody_makes_a_folder_in_proc():
    """Root has every permission there, and the kernel says that the folder does not exist."""
    with pytest.raises(UserError, match=r"paths\.store='/proc/x' is not writable"):
        check_folders({"paths.store": Path("/proc/x")})


@pytest.mark.parametrize("command", ["plan", "plan engine=tensorrt_llm hardware=h100_sxm", SIZE])
@pytest.mark.parametrize("content", [None, "{", '{"schema": 0}'])
def test_a_fit_that_cannot_be_read_is_refused_by_every_command(command, content, tmp_path, capsys, monkeypatch):
    """A plan said so in a line among others, and ended well."""
    monkeypatch.setenv("COLUMNS", "2000")
    fit = tmp_path / "fit.json"
    if content is not None:
        fit.write_text(content)
    assert f"sizing.fit={fit}" in refusal("sizing.fit", fit, command, tmp_path, capsys)
