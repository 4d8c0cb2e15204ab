"""Every refusal names what was given, what is allowed and what to do."""

import json
import re

import pytest

from pipelines.domain.errors import UserError
from tests.support.engine_folders import write_engine, write_tokenizer
from triton_repo.check import check_repository
from triton_repo.config import TritonSettings
from triton_repo.generate import parse, to_text
from triton_repo.parameters import RepositorySpec
from triton_repo.write import write_repository


@pytest.fixture
def repo(tmp_path):
    """A sound GPU repository of an engine with two ranks."""
    write_repository(
        tmp_path / "repo",
        engine_dir=write_engine(tmp_path / "engine", tp_size=2),
        tokenizer_dir=write_tokenizer(tmp_path / "model"),
        settings=TritonSettings(gpu_device_ids=((0, 1),)),
        spec=RepositorySpec("tensorrt_llm", "llama", "fp8", tp_size=2),
        made_from={},
    )
    for name in ("preprocessing", "postprocessing", "tensorrt_llm_bls"):
        (tmp_path / "repo" / name / "1" / "model.py").write_text("")
    return tmp_path / "repo"


def change(repo, model, edit):
    """Edit one model's configuration in place."""
    file = repo / model / "config.pbtxt"
    config = parse(file.read_text())
    edit(config)
    file.write_text(to_text(config))


def refused(repo, message, **options):
    """Assert that a fault says this."""
    faults = check_repository(repo, **options)
    assert faults, "nothing was found"
    with pytest.raises(UserError, match=message):
        raise UserError.of(faults)


def parameter(name, value):
    """An edit that sets one parameter."""

    def edit(config):
        config.parameters[name].string_value = value

    return edit


def test_a_sound_repository_has_no_fault(repo):
    assert check_repository(repo) == []
    assert check_repository(repo, running_version=lambda _name: "1.2.1") == []


def test_an_empty_folder_is_no_repository(tmp_path):
    refused(tmp_path, f"'{tmp_path}' is not a model repository")


def test_another_version_of_the_engine_is_refused(repo):
    refused(
        repo,
        r"built by TensorRT-LLM 1\.2\.1; this server runs TensorRT-LLM 1\.0\.0\..*make repository",
        running_version=lambda _name: "1.0.0",
    )


def test_a_batch_the_engine_cannot_take(repo):
    change(repo, "ensemble", lambda config: setattr(config, "max_batch_size", 99))
    refused(repo, "ensemble has max_batch_size=99; the engine was built for 8. At most 8")


def test_a_preferred_batch_beyond_the_largest(repo):
    change(repo, "preprocessing", lambda config: config.dynamic_batching.preferred_batch_size.append(77))
    refused(repo, "preprocessing has preferred_batch_size=77 and max_batch_size=8")


@pytest.mark.parametrize("beams", ["4", "0", "many"])
def test_beams_the_engine_has_not(repo, beams):
    change(repo, "tensorrt_llm", parameter("max_beam_width", beams))
    refused(repo, f"max_beam_width={beams}; the engine was built for 1")


def test_logits_of_another_type(repo):
    def edit(config):
        config.output[4].data_type = 10

    change(repo, "tensorrt_llm", edit)
    refused(repo, "declares context_logits as TYPE_FP16; the engine's logits are float32. It must be TYPE_FP32")


@pytest.mark.parametrize(("rows", "found"), [(64, True), (0, False)])
def test_a_prompt_table_of_another_type(repo, tmp_path, rows, found):
    """NVIDIA's templates have FP16 whatever the engine is, which does no harm where it takes no table."""

    def edit(config):
        table = next(each for each in config.input if each.name == "prompt_embedding_table")
        assert table.data_type == 14  # BF16
        table.data_type = 10

    write_engine(repo / "tensorrt_llm" / "1" / "engine", tp_size=2, max_prompt_embedding_table_size=rows)
    change(repo, "tensorrt_llm", edit)
    says = "declares prompt_embedding_table as TYPE_FP16; the engine computes in bfloat16. It must be TYPE_BF16"
    assert [says in f"{fault.message} {fault.allowed}" for fault in check_repository(repo)] == [True] * found


def test_a_prompt_table_of_another_shape(repo):
    def edit(config):
        next(each for each in config.input if each.name == "prompt_embedding_table").dims.append(1)

    change(repo, "tensorrt_llm", edit)
    refused(repo, r"prompt_embedding_table' as BF16\[-1, -1, 1\]\. Clients take it for BF16\[-1, -1\]")


def test_decoupled_in_one_model_only(repo):
    change(repo, "tensorrt_llm_bls", lambda config: setattr(config.model_transaction_policy, "decoupled", False))
    refused(repo, "decoupled is True in tensorrt_llm and False in tensorrt_llm_bls")


@pytest.mark.parametrize("ids", ["0", "0,0", "0,1,2", "0,x"])
def test_ranks_and_gpus_that_do_not_match(repo, ids):
    change(repo, "tensorrt_llm", parameter("gpu_device_ids", ids))
    refused(repo, rf"gpu_device_ids='{ids}'; the engine has 2 rank\(s\)")


def test_nodes_that_share_the_ranks_unevenly(repo):
    change(repo, "tensorrt_llm", parameter("num_nodes", "3"))
    refused(repo, r"num_nodes=3; the engine has 2 rank\(s\)")


def test_several_nodes_name_no_participants(repo):
    change(repo, "tensorrt_llm", parameter("num_nodes", "2"))
    change(repo, "tensorrt_llm", parameter("participant_ids", "1,2"))
    refused(repo, "num_nodes=2 and participant_ids='1,2'")


def test_every_node_numbers_its_gpus_alike(repo):
    change(repo, "tensorrt_llm", parameter("num_nodes", "2"))
    change(repo, "tensorrt_llm", parameter("gpu_device_ids", "0,0"))
    assert check_repository(repo) == []


def test_participants_that_do_not_match(repo):
    change(repo, "tensorrt_llm", parameter("participant_ids", "1,2;3"))
    refused(repo, r"participant_ids='3'; the engine has 2 rank\(s\)")


def test_chunked_context_without_its_kernel(tmp_path, repo):
    (repo / "tensorrt_llm/1/engine/config.json").unlink()
    write_engine(repo / "tensorrt_llm/1/engine", tp_size=2, plugin_config={"use_paged_context_fmha": False})
    change(repo, "tensorrt_llm", parameter("enable_chunked_context", "true"))
    refused(repo, "enable_chunked_context=true; the engine was built with use_paged_context_fmha=false")


def test_an_engine_exchanged_afterwards(repo):
    """Sizes in the answers' error messages and in the report would be those of another engine."""
    (repo / "tensorrt_llm/1/engine/config.json").unlink()
    write_engine(repo / "tensorrt_llm/1/engine", tp_size=2, max_input_len=32)
    refused(repo, "made for an engine with max_input_len=64; the engine in it has 32")


def test_an_engine_with_a_rank_missing(repo):
    (repo / "tensorrt_llm/1/engine/rank1.engine").unlink()
    refused(repo, r"lacks rank1\.engine. It is built for 2 rank\(s\)")


def test_no_engine_at_all(repo):
    change(repo, "tensorrt_llm", parameter("gpt_model_path", "tensorrt_llm/1/elsewhere"))
    refused(repo, "elsewhere' is not an engine folder")


def test_an_engine_that_is_not_named(repo):
    change(repo, "tensorrt_llm", parameter("gpt_model_path", ""))
    refused(repo, "tensorrt_llm has no parameter gpt_model_path")


def test_an_openvino_engine_under_the_gpu_backend(repo):
    write_engine(repo / "tensorrt_llm/1/new", "openvino")
    change(repo, "tensorrt_llm", parameter("gpt_model_path", "tensorrt_llm/1/new"))
    refused(repo, "has backend 'tensorrtllm', and its engine is built by OpenVINO. It must be 'python'")


def test_placeholders_of_a_template_half_filled(repo):
    """In a string the file still parses; where a number belongs it does not."""
    change(repo, "preprocessing", parameter("tokenizer_dir", "${tokenizer_dir}"))
    file = repo / "tensorrt_llm_bls" / "config.pbtxt"
    file.write_text(file.read_text().replace("max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}"))
    refused(repo, re.escape("preprocessing/config.pbtxt still has ${tokenizer_dir}"))
    refused(repo, re.escape("tensorrt_llm_bls/config.pbtxt still has ${triton_max_batch_size}"))


def test_a_placeholder_in_a_comment_is_none(repo):
    file = repo / "ensemble" / "config.pbtxt"
    file.write_text("# ${triton_max_batch_size}\n" + file.read_text())
    assert check_repository(repo) == []


def test_a_file_that_is_no_configuration(repo):
    (repo / "ensemble" / "config.pbtxt").write_text("platform: ensemble }")
    refused(repo, "ensemble/config.pbtxt is not a model configuration")


def test_a_model_under_another_name(repo):
    change(repo, "ensemble", lambda config: setattr(config, "name", "assembly"))
    refused(repo, "ensemble/config.pbtxt names the model 'assembly'. It must be 'ensemble'")


def test_a_tensor_no_client_knows(repo):
    change(repo, "ensemble", lambda config: setattr(config.input[0], "name", "text_inputs"))
    refused(repo, "ensemble declares the input 'text_inputs'.*Did you mean 'text_input'")


def test_a_tensor_of_another_shape(repo):
    change(repo, "postprocessing", lambda config: config.output[0].dims.append(3))
    refused(repo, r"postprocessing declares the output 'OUTPUT' as STRING\[-1, 3\]. Clients take it for STRING\[-1\]")


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("preprocessing/1/model.py", "preprocessing has no 'preprocessing/1/model.py'"),
        (
            "preprocessing/1/tokenizer/tokenizer.json",
            "tokenizer_dir='preprocessing/1/tokenizer', where no tokenizer is",
        ),
        ("postprocessing/config.pbtxt", "ensemble calls the model 'postprocessing', which is not here"),
    ],
)
def test_a_file_that_is_missing(repo, lost, message):
    (repo / lost).unlink()
    refused(repo, message)


def test_a_version_folder_that_is_missing(repo):
    (repo / "ensemble/1/.keep").unlink()
    (repo / "ensemble/1").rmdir()
    refused(repo, "ensemble has no version folder 'ensemble/1'")


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[]", "holds a list")])
def test_a_damaged_description(repo, content, message):
    (repo / "repository.json").write_text(content)
    refused(repo, f"repository.json .*{message}" if content == "{" else message)


def test_somebody_elses_repository_needs_no_description(repo):
    (repo / "repository.json").unlink()
    assert check_repository(repo) == []


def test_all_faults_come_at_once(repo):
    change(repo, "tensorrt_llm", parameter("max_beam_width", "9"))
    change(repo, "ensemble", lambda config: setattr(config, "max_batch_size", 99))
    assert len(check_repository(repo)) == 2
    assert json.loads((repo / "repository.json").read_text())["world_size"] == 2
