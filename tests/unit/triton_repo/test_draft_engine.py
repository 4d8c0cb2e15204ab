"""A draft engine beside its target: what stands in the repository, and what is refused before it is written."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.domain.errors import UserError
from tests.support.engine_folders import write_engine, write_tokenizer
from triton_repo.check import check_repository
from triton_repo.config import TritonSettings
from triton_repo.generate import parse
from triton_repo.parameters import RepositorySpec, start_commands
from triton_repo.write import write_repository

GPU = RepositorySpec("tensorrt_llm", "llama", "fp8", num_draft_tokens=4)
CPU = RepositorySpec("openvino", "llama", "fp8", num_draft_tokens=4)
HALF = TritonSettings(kv_cache_free_gpu_mem_fraction=0.45)


def make(root: Path, spec: RepositorySpec = GPU, settings: TritonSettings = HALF, *, target=None, draft=None) -> Path:
    """A repository with a draft engine; `target` and `draft` change the engines' build limits."""
    flavour = spec.flavour
    write_repository(
        root / "repo",
        engine_dir=write_engine(root / "engine", flavour, **{"max_draft_len": 4, **(target or {})}),
        tokenizer_dir=write_tokenizer(root / "model"),
        settings=settings,
        spec=spec,
        made_from={},
        draft_dir=write_engine(root / "draft", flavour, **(draft or {})),
    )
    return root / "repo"


def parameters(repo: Path, model: str) -> dict[str, str]:
    config = parse((repo / model / "config.pbtxt").read_text())
    return {name: value.string_value for name, value in config.parameters.items()}


def test_the_gpu_repository_has_a_second_model_with_its_own_engine(tmp_path):
    repo = make(tmp_path)
    assert (repo / "tensorrt_llm_draft/1/engine/rank0.engine").is_file()
    draft, target = parameters(repo, "tensorrt_llm_draft"), parameters(repo, "tensorrt_llm")
    assert draft["gpt_model_path"] == "tensorrt_llm_draft/1/engine"
    assert draft["enable_kv_cache_reuse"] == target["enable_kv_cache_reuse"] == "true"
    assert parameters(repo, "tensorrt_llm_bls")["tensorrt_llm_draft_model_name"] == "tensorrt_llm_draft"
    assert check_repository(repo) == []


def test_the_cpu_repository_hands_it_to_the_engine(tmp_path):
    repo = make(tmp_path, CPU)
    assert (repo / "tensorrt_llm/1/draft_engine/openvino_model.xml").is_file()
    assert not (repo / "tensorrt_llm_draft").exists()
    given = parameters(repo, "tensorrt_llm")
    assert given["openvino_draft_dir"] == "tensorrt_llm/1/draft_engine"
    assert given["openvino_num_draft_tokens"] == "4"
    assert check_repository(repo) == []


def test_gpus_of_its_own_are_its_own(tmp_path):
    settings = TritonSettings(gpu_device_ids=((0,),), draft_gpu_device_ids=((1,),))
    repo = make(tmp_path, settings=settings)  # 0.9 of the free memory of each
    assert parameters(repo, "tensorrt_llm")["gpu_device_ids"] == "0"
    assert parameters(repo, "tensorrt_llm_draft")["gpu_device_ids"] == "1"


def test_every_rank_loads_both_models():
    line = start_commands(HALF, replace(GPU, tp_size=2))["commands"]["leader"]
    assert line.count("--load-model=tensorrt_llm ") == line.count("--load-model=tensorrt_llm_draft ") == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": {"max_draft_len": 2}}, "num_draft_tokens=4; the engine was built with max_draft_len=2"),
        ({"draft": {"max_seq_len": 64}}, "draft engine has max_seq_len=64; the engine has 124"),
        ({"draft": {"plugin_config": {"use_paged_context_fmha": False}}}, "The draft engine was built with use_paged"),
        ({"spec": replace(GPU, enable_kv_cache_reuse=False)}, "enable_block_reuse=false: with a draft model"),
        ({"settings": TritonSettings()}, "kv_cache_free_gpu_mem_fraction=0.9 with a draft model on the same GPU"),
        (
            {"settings": TritonSettings(participant_ids=((1,),))},
            r"participant_ids=.* conflicts with a draft",
        ),
        ({"settings": TritonSettings(draft_gpu_device_ids=((1, 2),))}, r"draft_gpu_device_ids has \[1, 2\]"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, given, message):
    with pytest.raises(UserError, match=message):
        make(tmp_path, **given)


def test_another_vocabulary_is_refused(tmp_path):
    draft = write_engine(tmp_path / "draft")
    config = draft / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 1920', '"vocab_size": 32000'))
    with pytest.raises(UserError, match="draft engine has 32000 tokens, the engine 1920"):
        write_repository(
            tmp_path / "repo",
            engine_dir=write_engine(tmp_path / "engine", max_draft_len=4),
            tokenizer_dir=write_tokenizer(tmp_path / "model"),
            settings=HALF,
            spec=GPU,
            made_from={},
            draft_dir=draft,
        )


def test_a_number_without_an_engine_is_refused(tmp_path):
    with pytest.raises(UserError, match="num_draft_tokens=4 with the draft engine 'None'"):
        write_repository(
            tmp_path / "repo",
            engine_dir=write_engine(tmp_path / "engine"),
            tokenizer_dir=write_tokenizer(tmp_path / "model"),
            settings=HALF,
            spec=GPU,
            made_from={},
        )


def test_an_exchanged_draft_engine_is_found(tmp_path):
    repo = make(tmp_path)
    config = repo / "tensorrt_llm_draft/1/engine/config.json"
    text = config.read_text().replace('"vocab_size": 1920', '"vocab_size": 1921')
    config.unlink()
    config.write_text(text)
    (fault,) = check_repository(repo)
    assert "draft engine has 1921 tokens" in str(fault)
