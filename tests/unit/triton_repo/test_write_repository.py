"""A written repository holds all it needs and says what it was made from."""

import errno
import json
import os
import shutil
from dataclasses import replace

import pytest
import yaml

from pipelines import __version__
from pipelines.domain.errors import UserError
from pipelines.domain.progress import SilentProgress
from pipelines.stages.repository import WriteRepository
from tests.support.engine_folders import write_engine, write_llm_folder, write_tokenizer
from triton_repo import llmapi, write
from triton_repo.check import check_repository
from triton_repo.config import TritonSettings
from triton_repo.parameters import ImageSpec, RepositorySpec
from triton_repo.write import write_repository

CPU = RepositorySpec("openvino", "tiny_llama", "fp8", options={"num_threads": 2, "kv_cache_bytes": None})
GPU = RepositorySpec("tensorrt_llm", "llama", "fp8")


@pytest.fixture(autouse=True)
def sources(tmp_path, monkeypatch):
    """Model code of a few bytes, with the leavings of a run beside it."""
    for name in ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls"):
        folder = tmp_path / "sources" / name
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "model.py").write_text("# model")
        (folder / "__pycache__" / "model.pyc").write_bytes(b"")
    monkeypatch.setattr(write, "SOURCES", tmp_path / "sources")


def make(tmp_path, spec=CPU, settings=None, **engine):
    """A repository of an engine in the same folder."""
    flavour = "tensorrt_llm" if spec.flavour == "llmapi" else spec.flavour
    engine_dir = write_engine(tmp_path / "engine", flavour, **engine)
    facts = write_repository(
        tmp_path / "repo",
        engine_dir=engine_dir,
        tokenizer_dir=write_tokenizer(tmp_path / "model"),
        settings=settings or TritonSettings(),
        spec=spec,
        made_from={"build": "abc"},
    )
    return tmp_path / "repo", facts


def files(folder):
    """Relative names of all files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_tree_of_the_cpu_flavour(tmp_path):
    repo, facts = make(tmp_path)
    code = {f"{name}/1/model.py" for name in ("preprocessing", "tensorrt_llm", "postprocessing", "tensorrt_llm_bls")}
    tokenizer = {"tokenizer.json", "tokenizer_config.json", "config.json"}  # no weights, no README
    assert files(repo) == {
        "repository.json",
        "ensemble/1/.keep",
        *(f"{name}/config.pbtxt" for name in facts["models"]),
        *code,
        "preprocessing/1/pictures.py",
        *(f"{name}/1/tokenizer_folder.py" for name in ("preprocessing", "postprocessing")),
        *(f"tensorrt_llm/1/engine/{name}" for name in ("config.json", "openvino_model.xml", "openvino_model.bin")),
        *(f"{model}/1/tokenizer/{name}" for model in ("preprocessing", "postprocessing") for name in tokenizer),
    }
    assert check_repository(repo) == []


def test_the_gpu_flavour_has_no_code_for_the_engine(tmp_path):
    repo, _ = make(tmp_path, replace(GPU, tp_size=2), tp_size=2)
    inside = {name for name in files(repo) if name.startswith("tensorrt_llm/1/")}
    assert inside == {f"tensorrt_llm/1/{name}" for name in (".keep", "engine/config.json", *ranks(2))}
    assert check_repository(repo) == []


def ranks(count):
    """Names of an engine's files."""
    return [f"engine/rank{rank}.engine" for rank in range(count)]


def test_the_engine_is_a_hard_link(tmp_path):
    repo, _ = make(tmp_path)
    place = repo / "tensorrt_llm/1/engine/openvino_model.bin"
    assert place.samefile(tmp_path / "engine/openvino_model.bin")
    assert not place.is_symlink()


def test_a_tokenizer_that_is_edited_in_place_does_not_change_the_repository(tmp_path):
    repo, _ = make(tmp_path)
    place, source = repo / "preprocessing/1/tokenizer/tokenizer.json", tmp_path / "model/tokenizer.json"
    whole = source.read_text()
    source.write_text("edited")
    assert place.read_text() == whole
    assert not place.is_symlink()


def test_the_bytes_do_not_depend_on_where_things_are(tmp_path):
    """Equal keys, equal bytes: the key holds the content of the inputs, not their places."""
    first, _ = make(tmp_path / "here")
    second, _ = make(tmp_path / "elsewhere" / "deeper")
    files = [sorted(path.relative_to(repo) for path in repo.rglob("*") if path.is_file()) for repo in (first, second)]
    assert files[0] == files[1]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files[0])


def test_equal_inputs_in_folders_of_other_names_give_equal_repositories(tmp_path):
    """The key has the content of engine and tokenizer; repository.json once had the names of their folders too."""
    files = []
    for name in ("int8-0123", "int8-4567"):
        engine, model = (
            write_engine(tmp_path / f"engine-{name}", "openvino"),
            write_tokenizer(tmp_path / f"model-{name}"),
        )
        stage = WriteRepository(TritonSettings(), RepositorySpec("openvino", "tiny", "fp8"))
        stage.run({"engine": engine, "model": model}, tmp_path / f"out-{name}", SilentProgress())
        found = sorted(path for path in (tmp_path / f"out-{name}").rglob("*") if path.is_file())
        files.append({path.relative_to(tmp_path / f"out-{name}"): path.read_bytes() for path in found})
    assert len(files[0]) > 5
    assert files[0] == files[1]


def test_the_stage_takes_an_engine_of_its_ranks(tmp_path):
    stage = WriteRepository(TritonSettings(), RepositorySpec("tensorrt_llm", "llama", "fp8", tp_size=2))
    inputs = {"engine": write_engine(tmp_path / "engine", tp_size=2), "model": write_tokenizer(tmp_path / "model")}
    assert stage.run(inputs, tmp_path / "out", SilentProgress())["flavour"] == "tensorrt_llm"


def test_a_symbolic_link_of_a_cache_becomes_a_file(tmp_path):
    """The Hub's cache is made of them, and they would not survive a copy."""
    write_tokenizer(tmp_path / "model")
    (tmp_path / "blob").write_text('{"vocab": 1}')
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer.json").symlink_to(tmp_path / "blob")
    target = tmp_path / "target"
    llmapi.link_files(llmapi.tokenizer_files(tmp_path / "model"), tmp_path / "model", target)
    assert not (target / "tokenizer.json").is_symlink()
    assert (target / "tokenizer.json").read_text() == '{"vocab": 1}'


def test_another_file_system_gets_copies(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    repo, _ = make(tmp_path)
    copied = repo / "tensorrt_llm/1/engine/openvino_model.bin"
    assert copied.read_bytes() == b"weights"
    assert not copied.samefile(tmp_path / "engine/openvino_model.bin")


def test_a_full_disk_is_not_mistaken_for_another_file_system(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path)


def test_a_copied_folder_is_whole(tmp_path):
    repo, _ = make(tmp_path)
    shutil.copytree(repo, tmp_path / "elsewhere")
    shutil.rmtree(repo)
    shutil.rmtree(tmp_path / "engine")
    assert check_repository(tmp_path / "elsewhere") == []


def test_no_path_of_this_machine_is_written(tmp_path):
    repo, _ = make(tmp_path)
    for name in ("repository.json", *(f"{path.parent.name}/config.pbtxt" for path in repo.glob("*/config.pbtxt"))):
        assert str(tmp_path) not in (repo / name).read_text()


def test_what_it_was_made_from_is_recorded(tmp_path):
    repo, facts = make(tmp_path, settings=TritonSettings(kv_cache_free_gpu_mem_fraction=0.5))
    described = json.loads((repo / "repository.json").read_text())
    assert (described["label"], described["variant"], described["flavour"]) == ("tiny_llama", "fp8", "openvino")
    assert (described["engine_version"], described["pipelines_version"]) == ("2026.4.1", __version__)
    assert (described["limits"]["max_batch_size"], described["world_size"]) == (8, 1)
    assert described["made_from"] == {"build": "abc"}
    assert described["settings_without_effect"] == ["kv_cache_free_gpu_mem_fraction"]
    assert facts["bytes"] > 0


def test_options_of_the_cpu_engine_reach_its_model(tmp_path):
    repo, _ = make(tmp_path)
    text = (repo / "tensorrt_llm/config.pbtxt").read_text()
    assert 'key: "openvino_num_threads"' in text
    assert "openvino_kv_cache_bytes" not in text  # None is the engine's own default
    assert f'string_value: "{__version__}"' in text


def test_an_engine_without_tokenizer_is_refused(tmp_path):
    engine = write_engine(tmp_path / "engine", "openvino")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"'{tmp_path / 'model'}' has no tokenizer.*tokenizer.json"):
        write_repository(
            tmp_path / "repo",
            engine_dir=engine,
            tokenizer_dir=tmp_path / "model",
            settings=TritonSettings(),
            spec=CPU,
            made_from={},
        )


def test_the_other_flavours_engine_is_refused(tmp_path):
    engine = write_engine(tmp_path / "engine", "openvino")
    with pytest.raises(UserError, match="flavour 'openvino', but the repository is for 'tensorrt_llm'"):
        write_repository(
            tmp_path / "repo",
            engine_dir=engine,
            tokenizer_dir=write_tokenizer(tmp_path / "model"),
            settings=TritonSettings(),
            spec=GPU,
            made_from={},
        )


def test_all_faults_of_settings_and_engine_come_at_once(tmp_path):
    with pytest.raises(UserError) as caught:
        make(tmp_path, replace(CPU, tp_size=2), TritonSettings(decoding_mode="eagle"))
    text = "\n".join(str(fault) for fault in caught.value.faults)
    assert "build.tp_size=2" in text
    assert "decoding_mode='eagle'" in text
    assert not (tmp_path / "repo").exists()


def test_more_than_the_engine_takes_is_refused(tmp_path):
    with pytest.raises(UserError, match="max_batch_size=16; the engine was built for 8"):
        make(tmp_path, settings=TritonSettings(triton_max_batch_size=16))


def test_llmapi_has_one_model_and_its_yaml(tmp_path):
    engine = write_llm_folder(tmp_path / "engine", tensor_parallel_size=2, max_seq_len=2048)
    (engine / "checkpoint" / "pytorch_model.bin").write_bytes(b"the same weights again")
    facts = write_repository(
        tmp_path / "repo",
        engine_dir=engine,
        tokenizer_dir=engine / "checkpoint",
        settings=TritonSettings(decoupled_mode=False, cuda_graph_mode=True, cancellation_check_period_ms=50),
        spec=RepositorySpec("llmapi", "llama", "fp8", tp_size=2),
        made_from={},
    )
    content = yaml.safe_load((tmp_path / "repo/tensorrt_llm/1/model.yaml").read_text())
    assert (content["model"], content["backend"]) == ("tensorrt_llm/1/checkpoint", "pytorch")
    assert (content["tensor_parallel_size"], content["max_seq_len"]) == (2, 2048)
    assert content["triton_config"] == {"max_batch_size": 0, "decoupled": False, "cancellation_check_period_ms": 50}
    linked = {path.name for path in (tmp_path / "repo/tensorrt_llm/1/checkpoint").iterdir()}
    assert linked == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert facts["models"] == ["tensorrt_llm"]
    assert facts["settings_without_effect"] == ["cuda_graph_mode"]
    assert check_repository(tmp_path / "repo", to_be_served=False) == []
    (fault,) = check_repository(tmp_path / "repo")
    assert "no 'tensorrt_llm/1/model.py': its code is NVIDIA's" in str(fault)
    assert "serving.server=trtllm_serve" in str(fault)


def test_llmapi_refuses_an_engine(tmp_path):
    with pytest.raises(UserError, match=f"'{tmp_path / 'engine'}' is not made for the LLM API"):
        make(tmp_path, RepositorySpec("llmapi", "llama", "fp8"))


def test_llmapi_refuses_other_ranks(tmp_path):
    engine = write_llm_folder(tmp_path / "engine", tensor_parallel_size=4)
    with pytest.raises(UserError, match=r"tp_size=2 .* tensor_parallel_size=4"):
        write_repository(
            tmp_path / "repo",
            engine_dir=engine,
            tokenizer_dir=engine / "checkpoint",
            settings=TritonSettings(),
            spec=RepositorySpec("llmapi", "llama", "fp8", tp_size=2),
            made_from={},
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: (model / "model.yaml").write_text("backend: pytorch\nmax_batch_size: x\n"),
            "max_batch_size='x'",
        ),
        (lambda model: (model / "checkpoint" / "config.json").unlink(), "lacks config.json"),
        (lambda model: (model / "checkpoint" / "tokenizer.json").unlink(), "lacks a tokenizer"),
    ],
)
def test_what_would_stop_the_llm_api_is_found(tmp_path, change, message):
    engine = write_llm_folder(tmp_path / "engine")
    spec = RepositorySpec("llmapi", "llama", "fp8")
    write_repository(
        tmp_path / "repo",
        engine_dir=engine,
        tokenizer_dir=engine / "checkpoint",
        settings=TritonSettings(),
        spec=spec,
        made_from={},
    )
    change(tmp_path / "repo/tensorrt_llm/1")
    (fault,) = check_repository(tmp_path / "repo", to_be_served=False)
    assert message in str(fault)


def test_with_images_the_code_comes_from_nvidias_container(tmp_path):
    """What can only come from there is named when a server is to start, with its place and the command."""
    spec = RepositorySpec("tensorrt_llm", "llava", "fp8", images=ImageSpec("llava", "/models/llava", 2))
    (tmp_path / "vision").mkdir()
    (tmp_path / "vision" / "visual_encoder.engine").write_bytes(b"sees")
    write_repository(
        tmp_path / "repo",
        engine_dir=write_engine(tmp_path / "engine"),
        tokenizer_dir=write_tokenizer(tmp_path / "model"),
        settings=TritonSettings(),
        spec=spec,
        made_from={},
        vision_dir=tmp_path / "vision",
    )
    repo = tmp_path / "repo"
    assert check_repository(repo, to_be_served=False) == []
    said = "\n".join(map(str, check_repository(repo)))
    for name, place in (("multimodal_encoders", "multimodal"), ("tensorrt_llm_bls", "inflight_batcher_llm")):
        assert f"{name} has no '{name}/1/model.py': where there are images its code is NVIDIA's" in said
        assert f"/app/all_models/{place}/{name}/1" in said
    command = json.loads((repo / "repository.json").read_text())["start"]["commands"]["leader"]
    assert "cp -r /app/all_models/multimodal/multimodal_encoders/1/. multimodal_encoders/1/ && tritonserver" in command
    assert (repo / "multimodal_encoders/1/engine/visual_encoder.engine").read_bytes() == b"sees"
    for name in ("multimodal_encoders", "preprocessing", "tensorrt_llm_bls"):
        (repo / name / "1" / "model.py").write_text("")
    assert check_repository(repo) == []


def test_images_and_retention_are_refused_together(tmp_path):
    spec = RepositorySpec("tensorrt_llm", "llava", "fp8", images=ImageSpec("llava", "/models/llava", 2))
    with pytest.raises(UserError, match="retention_tokens=5 with images"):
        make(tmp_path, spec, TritonSettings(retention_tokens=5))


def test_a_draft_checkpoint_of_the_llm_api_is_carried(tmp_path):
    speculation = {"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "draft"}
    engine = write_llm_folder(tmp_path / "engine", speculative_config=speculation)
    (engine / "draft").mkdir()
    (engine / "draft" / "config.json").write_text("{}")
    (engine / "draft" / "model.safetensors").write_bytes(b"small")
    write_repository(
        tmp_path / "repo",
        engine_dir=engine,
        tokenizer_dir=engine / "checkpoint",
        settings=TritonSettings(),
        spec=RepositorySpec("llmapi", "llama", "fp8"),
        made_from={},
    )
    repo = tmp_path / "repo"
    content = yaml.safe_load((repo / "tensorrt_llm/1/model.yaml").read_text())
    assert content["speculative_config"]["speculative_model"] == "tensorrt_llm/1/draft"
    assert check_repository(repo, to_be_served=False) == []
    (repo / "tensorrt_llm/1/draft/model.safetensors").unlink()
    (fault,) = check_repository(repo, to_be_served=False)
    assert "draft' lacks *.safetensors" in str(fault)
